"""Checkpoints that ask torch for far too much of what it allows: they are refused before it reads them.

Read by torch alone, these files reserve or fill gigabytes, crash the process, or do not come back.
"""

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.interop.checkpoints.safe_pickle import read_pickle
from tests.interop.test_import import MAIN, changed, refused

PROTOCOL, STOP, MARK, TUPLE, TUPLE1, TUPLE2, REDUCE = b"\x80\x02", b".", b"(", b"t", b"\x85", b"\x86", b"R"
EMPTY_DICT, EMPTY_LIST, NONE, FALSE, PERSISTENT = b"}", b"]", b"N", b"\x89", b"Q"
SETITEM, APPEND, APPENDS = b"s", b"a", b"e"


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def archive(path: Path, steps: bytes) -> Path:
    """As torch.save writes files since 2020."""
    with zipfile.ZipFile(path, "w") as packed:
        members = {"data.pkl": PROTOCOL + steps + STOP, "byteorder": b"little", "data/0": bytes(4), "version": b"3\n"}
        for member, content in members.items():
            packed.writestr(f"archive/{member}", content)
    return path


def legacy(path: Path, steps: bytes) -> Path:
    """As torch.save wrote them in 2019, without the bytes of any storage."""
    before = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    parts = [*(pickle.dumps(part, 2) for part in before), PROTOCOL + steps + STOP, pickle.dumps([], 2)]
    path.write_bytes(b"".join(parts))
    return path


def doubled(times: int) -> bytes:
    """A tuple with the one before it twice, and so on."""
    steps = number(7)
    for place in range(times):
        steps += put(place) + get(place) + TUPLE2
    return steps


def key(steps: bytes) -> bytes:
    """The only key of a mapping."""
    return EMPTY_DICT + steps + NONE + SETITEM


def called(module: str, what: str, *arguments: bytes) -> bytes:
    return name(module, what) + MARK + b"".join(arguments) + TUPLE + REDUCE


def copies(values: int, times: int) -> bytes:
    """A list of a list of numbers and of sets of these numbers."""
    inner = EMPTY_LIST + put(0) + MARK + b"".join(map(number, range(values))) + APPENDS
    return EMPTY_LIST + inner + APPEND + (called("__builtin__", "set", get(0)) + APPEND) * times


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a length": (called("__builtin__", "bytearray", number(2**31 - 1)), "it asks for __builtin__.bytearray"),
    "a storage": (called("torch.storage", "UntypedStorage", number(2**31 - 1)), "it asks for torch.storage.Untyped"),
    "a tensor": (called("torch", "FloatTensor", number(2**31 - 1)), "it asks for torch.FloatTensor"),
    "a doubled key": (key(doubled(60)), "its parts refer to one another so often"),
    "a deep key": (key(number(7) + TUPLE1 * 1_000_000), "its parts refer to one another so often"),
    "a doubled element": (called("__builtin__", "set", EMPTY_LIST + doubled(60) + APPEND), "so often"),
    "copies": (copies(10_000, 20_000), "its parts refer to one another so often"),
    "another encoding": (
        called("_codecs", "encode", text("".join(map(chr, range(256, 40_000)))), text("punycode")),
        "torch.save did not write it",
    ),
}


@pytest.mark.parametrize("write", [archive, legacy])
@pytest.mark.parametrize("what", HOSTILE)
def test_what_would_take_all_memory_or_no_end_is_refused(what: str, write: Any, tmp_path: Path, capsys) -> None:
    steps, message = HOSTILE[what]
    path = write(tmp_path / "hostile.pt", steps)
    assert message in refused(capsys, path, "--out", tmp_path / "run")


def test_storages_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    """A tensor of eight gigabytes, of which the file has none: its memory is there before it is used."""
    storage = MARK + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + number(2**31 - 1)
    storage += NONE + TUPLE + PERSISTENT
    size, stride = MARK + number(2**31 - 1) + TUPLE, MARK + number(1) + TUPLE
    hooks = called("collections", "OrderedDict")
    tensor = called("torch._utils", "_rebuild_tensor_v2", storage, number(0), size, stride, FALSE, hooks)
    with pytest.raises(ValueError, match=r"its tensors have 8,589,934,588 bytes, but the file has \d\d\d"):
        read_pickle(legacy(tmp_path / "promised.pt", tensor))


def test_an_archive_has_one_pickle(tmp_path: Path) -> None:
    """Readers differ in which of two they take."""
    path = archive(tmp_path / "two.pt", NONE)
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr("archive/Data.pkl", PROTOCOL + NONE + STOP)
    with pytest.raises(ValueError, match=r"it has 2 files data\.pkl, but torch\.save writes one"):
        read_pickle(path)


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    """Everything that checkpoints of plain data hold, shared and nested as much as they are in practice."""
    shared = torch.arange(6.0)
    contents: dict[str, Any] = {
        "model": {f"layer.{number}.weight": torch.full((2, 3), float(number)) for number in range(3000)},
        "tied": [shared, shared[2:], torch.nn.Parameter(shared.reshape(2, 3))],
        "plain": {(1, ("a", 2.5)): [None, True, -7, 2**40, "Größe", b"bytes", {3, 4}, (), torch.Size([2]), 1j]},
        "types": [torch.float16, torch.device("cpu"), torch.zeros(2, dtype=torch.bfloat16), torch.tensor(True)],
    }
    for new in (True, False):
        torch.save(contents, tmp_path / "plain.pt", _use_new_zipfile_serialization=new)
        found = read_pickle(tmp_path / "plain.pt")
        assert found["plain"] == contents["plain"]
        assert torch.equal(found["model"]["layer.2999.weight"], torch.full((2, 3), 2999.0))
        assert found["tied"][1].data_ptr() == found["tied"][0].data_ptr() + 8
        assert found["types"][:2] == contents["types"][:2]


@pytest.mark.parametrize("language", ["x/../secret", "../secret", "l" * 5000, ""])
def test_languages_lead_to_no_other_folder(language: str, tmp_path: Path, capsys) -> None:
    """They are parts of file names: the dictionary of x/../secret would be a file without dict in its name."""

    def change(contents: dict[str, Any]) -> None:
        contents["cfg"]["task"]["source_lang"] = language

    path = changed(MAIN, tmp_path, change)
    (tmp_path / "dict.x").mkdir()
    (tmp_path / "secret.txt").write_bytes((tmp_path / "dict.src.txt").read_bytes())
    assert "which is no name of a language" in refused(capsys, path, "--out", tmp_path / "run")


# ---------------------------------------------------------------------- keys with equal hashes

MODULUS = 2**61 - 1
"""Python's hash of a whole number is its rest by this: multiples of it all have the hash 0."""
COLLIDING = {
    "whole numbers": {number * MODULUS: 0 for number in range(1, 1500)},
    "negative numbers": {-number * MODULUS: 0 for number in range(1, 1500)},
    "tuples": {(number,): 0 for number in range(1500)},
    "a set": {number * MODULUS for number in range(1, 1500)},
}


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "legacy"])
@pytest.mark.parametrize("name", COLLIDING)
def test_keys_that_may_collide_are_few(name: str, zipped: bool, tmp_path: Path) -> None:
    """40,000 of them took ten seconds, and a hundred times more would take a day."""
    torch.save({"model": {}, "args": COLLIDING[name]}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="more than 1000 of its keys are large numbers or tuples"):
        read_pickle(tmp_path / "x.pt")


def test_usual_keys_are_read(tmp_path: Path) -> None:
    """Parameters are numbered and named; tensors bring tuples of their own, which are no keys."""
    state = {number: {"exp_avg": torch.ones(2)} for number in range(3000)}
    content = {"state": state, "names": {f"w{number}": number for number in range(3000)}, "few": {(1, 2): 2**70}}
    torch.save(content, tmp_path / "x.pt")
    found = read_pickle(tmp_path / "x.pt")
    assert len(found["state"]) == 3000
    assert found["few"] == {(1, 2): 2**70}
