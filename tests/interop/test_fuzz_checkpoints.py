"""Checkpoints that nobody meant: old pickles, and the JSON of a run with checksums that fit it."""

import argparse
import io
import json
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.files import CHECKSUM, to_checksummed_json
from subquad.interop.checkpoints import convert_checkpoint, import_checkpoint
from subquad.interop.checkpoints.run import TextFiles
from subquad.interop.checkpoints.safe_pickle import read_pickle
from subquad.train.checkpoint import CHECKSUMS, checksum
from subquad.train.run import load_trained
from tests.fuzzing import edited, fuzzed, junk, kept_promise
from tests.interop.test_import import LEGACY, MAIN

DICTIONARIES = [MAIN.parent / name for name in ("dict.src.txt", "dict.tgt.txt")]


def plain(value: Any) -> Any:
    """A checkpoint's content with namespaces as dictionaries, so that all of it can be edited."""
    if isinstance(value, argparse.Namespace):
        return {"a namespace": plain(vars(value))}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_stored(value: Any) -> Any:
    if isinstance(value, dict) and list(value) == ["a namespace"] and isinstance(value["a namespace"], dict):
        return argparse.Namespace(**{str(key): as_stored(inner) for key, inner in value["a namespace"].items()})
    if isinstance(value, dict):
        return {key: as_stored(inner) for key, inner in value.items()}
    return [as_stored(inner) for inner in value] if isinstance(value, list) else value


CONTENTS = {path.name: plain(read_pickle(path)) for path in (MAIN, LEGACY)}
TENSORS = st.sampled_from([(), (0,), (3,), (2, 3), (16, 16), (4, 1, 3)]).map(torch.zeros)


@fuzzed(30)
@given(content=st.sampled_from(sorted(CONTENTS)).flatmap(lambda name: edited(CONTENTS[name], junk() | TENSORS)))
def test_edited_checkpoints(tmp_path: Path, content: Any) -> None:
    """They are imported and can be used, or are refused."""
    for path in DICTIONARIES:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(as_stored(content), tmp_path / "edited.pt")
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    if kept_promise(lambda: import_checkpoint(tmp_path / "edited.pt", tmp_path / "run")) is not None:
        assert load_trained(tmp_path / "run").model.parameter_count() > 0


@fuzzed(60)
@given(
    path=st.sampled_from([MAIN, LEGACY]),
    place=st.floats(0, 1),
    length=st.integers(0, 300),
    new=st.binary(max_size=20) | st.sampled_from([b"\xff" * 8, b"\x00" * 64, b"\x80\x02", b"R", b"0" * 20]),
)
def test_damaged_checkpoints(tmp_path: Path, path: Path, place: float, length: int, new: bytes) -> None:
    content = path.read_bytes()
    begin = int(place * len(content))
    (tmp_path / "damaged.pt").write_bytes(content[:begin] + new + content[begin + length :])
    kept_promise(lambda: convert_checkpoint(tmp_path / "damaged.pt", TextFiles(DICTIONARIES[0], DICTIONARIES[1])))


@fuzzed(60)
@given(st.binary(max_size=60))
def test_pickles_of_any_bytes(tmp_path: Path, content: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x02}q\x00", b"PK\x03\x04"):
        (tmp_path / "any.pt").write_bytes(start + content)
        kept_promise(lambda: read_pickle(tmp_path / "any.pt"))


def test_tensors_larger_than_their_storage_are_refused(tmp_path: Path) -> None:
    """Strides of zero make a petabyte of four bytes; the first copy would ask for it."""
    torch.save({"model": {"x": torch.zeros(1).expand(2**24, 2**24)}}, tmp_path / "wide.pt")
    with pytest.raises(ValueError, match=r"a tensor of shape \(16777216, 16777216\) has only 4 bytes"):
        read_pickle(tmp_path / "wide.pt")


def test_compressed_checkpoints_are_refused(tmp_path: Path) -> None:
    plain_file, bomb = io.BytesIO(), tmp_path / "bomb.pt"
    torch.save({"model": torch.zeros(1 << 16)}, plain_file)
    with zipfile.ZipFile(plain_file) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    assert bomb.stat().st_size < 1 << 14
    with pytest.raises(ValueError, match=r"is compressed, which torch\.save does not do"):
        read_pickle(bomb)


@pytest.mark.parametrize("form", ["doubling", "itself"])
def test_parts_that_refer_to_one_another_without_end_are_refused(tmp_path: Path, form: str) -> None:
    """Ninety lists, each with the one before it twice, are 2^90 values to whoever walks through them."""
    inner: list[Any] = [0]
    for _ in range(90 if form == "doubling" else 0):
        inner = [inner, inner]
    if form == "itself":
        inner.append(inner)
    torch.save({"model": {}, "args": inner}, tmp_path / "deep.pt")
    with pytest.raises(ValueError, match="its parts refer to one another so often that it would become too large"):
        read_pickle(tmp_path / "deep.pt")


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    import_checkpoint(MAIN, folder)
    return folder


@fuzzed(20)
@given(data=st.data())
def test_edited_runs(run: Path, tmp_path: Path, data: st.DataObject) -> None:
    """JSON of a run by somebody who knows its checksums: it is loaded, or refused."""
    copied = tmp_path / "run"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(run, copied)
    (checkpoint,) = (copied / "checkpoints").iterdir()
    files = [copied / "inputs.json", checkpoint / "state.json", checkpoint / CHECKSUMS]
    files += sorted((copied / "tokenizers").rglob("*.json"))
    path = data.draw(st.sampled_from(files))
    content = json.loads(path.read_text())
    content.pop(CHECKSUM, None)
    changed = data.draw(edited(content))
    if path.name not in ("state.json", CHECKSUMS):
        path.write_text(to_checksummed_json({str(key): value for key, value in changed.items()}))
    else:
        path.write_text(json.dumps(changed))
    if path.name == "state.json":
        sums = json.loads(files[2].read_text())
        files[2].write_text(json.dumps({**sums, path.name: checksum(path)}))
    loaded = kept_promise(lambda: load_trained(copied, "last"))
    if loaded is not None:
        for side in ("source", "target"):
            kept_promise(partial(loaded.tokenizer, side))
