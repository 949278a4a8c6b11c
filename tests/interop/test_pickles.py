"""The restricted reader of old files: data comes out as it was stored, all else is refused and never runs."""

import argparse
import functools
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subquad.interop.checkpoints.safe_pickle import PartialCall, read_pickle, to_plain_options
from tests.interop.test_import import MAIN, changed, refused


class Touch:
    """Unpickled by anything that trusts it, it makes a file."""

    def __init__(self, path: Path, through: str) -> None:
        self.path, self.through = path, through

    def __reduce__(self) -> tuple[Any, ...]:
        if self.through == "os.system":
            return os.system, (f"touch {self.path}",)
        return eval, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("through", ["os.system", "eval"])
@pytest.mark.parametrize("form", ["zip", "2019", "plain", "protocol 2", "inside"])
def test_a_malicious_pickle_is_refused_and_nothing_runs(tmp_path, capsys, through, form) -> None:
    evil, path = Touch(tmp_path / "harm", through), tmp_path / "evil.pt"
    pickle.loads(pickle.dumps(evil))  # it is a real one
    (tmp_path / "harm").unlink()
    if form in ("plain", "protocol 2"):
        path.write_bytes(pickle.dumps({"model": {}, "args": evil}, protocol=2 if form == "protocol 2" else None))
    elif form == "inside":
        path = changed(MAIN, tmp_path, lambda contents: contents["extra_state"].update(best=evil))
    else:
        torch.save({"model": {}, "args": evil}, path, _use_new_zipfile_serialization=form == "zip")
    said = refused(capsys, path, "--out", tmp_path / "run")
    assert not (tmp_path / "harm").exists()
    assert "is refused: " in said
    assert "Nothing of it was run" in said
    assert ("it asks for" in said) == (form != "plain")  # the newest protocol is not even read so far


def test_stand_ins_hold_what_was_stored(tmp_path, monkeypatch) -> None:
    """Classes of the originals, which are not installed, and numbers of numpy."""
    for name, kinds in {"fairseq.meters": ("AverageMeter",), "efficient_attention": ("NestedNamespace",)}.items():
        module = types.ModuleType(name)
        for kind in kinds:
            base = argparse.Namespace if kind == "NestedNamespace" else object
            setattr(module, kind, type(kind, (base,), {"__module__": name}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "fairseq", types.ModuleType("fairseq"))
    meter = sys.modules["fairseq.meters"].AverageMeter()
    meter.sum = 7
    args = sys.modules["efficient_attention"].NestedNamespace(dim=4, inner=argparse.Namespace(window=3))
    numbers = [np.float64(1.5), np.int64(-7), np.float32(0.25), np.bool_(True)]
    torch.save({"args": args, "meter": meter, "numbers": numbers}, tmp_path / "old.pt")
    monkeypatch.undo()
    found = read_pickle(tmp_path / "old.pt")
    assert found["numbers"] == [1.5, -7, 0.25, True]
    assert [type(number) for number in found["numbers"]] == [float, int, float, bool]
    assert found["meter"].sum == 7
    assert to_plain_options(found["args"]) == {"dim": 4, "inner": {"window": 3}}


def test_a_partial_is_read_and_never_called(tmp_path: Path) -> None:
    given = {"norm": functools.partial(torch.nn.LayerNorm, 8, eps=1e-6)}
    torch.save(given, tmp_path / "named.pt")
    norm = read_pickle(tmp_path / "named.pt")["norm"]
    assert isinstance(norm, PartialCall)
    assert (norm.args, norm.keywords) == ((8,), {"eps": 1e-6})
    assert not callable(norm)
    assert not issubclass(norm.function, torch.nn.Module)


class Calls:
    """Pickled, it asks for a call of LayerNorm itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.nn.LayerNorm, (8,)


@pytest.mark.parametrize(
    "value",
    [Calls(), functools.partial(os.system, "true"), functools.partial(torch.nn.Linear, 8), torch.nn.LayerNorm(8)],
)
def test_what_only_stands_for_a_name_cannot_be_called(value: Any, tmp_path: Path) -> None:
    torch.save({"value": value}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="is refused: it asks for"):
        read_pickle(tmp_path / "evil.pt")
