"""Folders and checkpoints of fairseq's by somebody who means no good: each is read, or refused by one clear line.

Every one is given to a command in a process of its own, which may neither take long nor much memory.
"""

import argparse
import os
import random
import resource
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measured import Result
from subquad.interop.checkpoints.safe_pickle import read_pickle
from tests.data.fairseq_files import EOS, FORMS, write_dictionary, write_mmap
from torture.kills import outcome
from torture.processes import Child, apart

TITLES = {"hostile": "inputs without a clear answer, or that took more than 20 seconds or a gigabyte"}
SECONDS, MEMORY = 20.0, 1 << 30
LINE = 2200
"""Characters of a line that is still clear."""
CHECKPOINTS = Path(__file__).parent.parent / "tests" / "golden" / "fairseq" / "ckpt"
HUGE = (2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MMAP, TORCHNET = b"MMIDIDX\0\0", b"TNTIDX\0\0"
VALUES: tuple[Any, ...] = (
    *(2**31, 2**63, 10**30, -1, 0, 0.5, float("nan"), float("inf"), -1e308),
    *(None, True, "", "x", "x" * 100_000, "../../../../etc/passwd", "/dev/zero", "\0", "9" * 5000),
    *([], [[]], [2**31] * 3, {}, {"a": {}}, torch.zeros(0)),
)
"""What options are replaced by."""

Write = Callable[[Path, random.Random], None]


# ---------------------------------------------------------------------- folders


def _valid(folder: Path, draw: random.Random) -> Path:
    """A folder as it should be; returns the stem of its files."""
    write_dictionary(folder / "dict.txt", ["a", "b"])
    FORMS[draw.choice(sorted(FORMS))](folder / "train", [[4, 5, EOS], [4, EOS], [5, EOS]])
    return folder / "train"


def _cut(folder: Path, draw: random.Random) -> None:
    path = _valid(folder, draw).with_suffix(draw.choice([".idx", ".bin"]))
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def _damaged(folder: Path, draw: random.Random) -> None:
    """Some of the numbers of an index are others."""
    path = _valid(folder, draw).with_suffix(".idx")
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 3)):
        number = draw.choice([*HUGE, 0, 1, 3, 2**64 - 2])
        begin = draw.randrange(len(content))
        content[begin : begin + 8] = struct.pack("<Q", number)[: len(content) - begin]
    path.write_bytes(content)


def _lengths(folder: Path, draw: random.Random) -> None:
    """An index that agrees with itself and with the size of the file, modulo 2^64."""
    write_dictionary(folder / "dict.txt", ["a", "b"])
    part = 2 ** draw.randint(40, 62)
    lengths = [part] * (2**64 // part) + [2] if part >= 2**52 else [2**63 - 1, 2**63 - 1, 2, 2]
    draw.shuffle(lengths)
    begins = np.cumsum([0, *lengths], dtype=np.uint64).astype(np.int64).tolist()
    count = len(lengths)
    header = TORCHNET + struct.pack("<5Q", 1, 4, 4, count, count)
    numbers = [*range(count + 1), *begins, *lengths]
    (folder / "train.idx").write_bytes(header + struct.pack(f"<{len(numbers)}q", *numbers))
    (folder / "train.bin").write_bytes(struct.pack("<2i", 5, 3))


def _sizes(folder: Path, draw: random.Random) -> None:
    """Samples of any size, also negative ones, and begins anywhere."""
    _valid(folder, draw)
    sizes = [draw.choice([-1, -(2**31), 2**31 - 1, 0, 1, 3]) for _ in range(3)]
    begins = [draw.choice([0, -2, 6, 2**62, -(2**63)]) for _ in range(3)]
    (folder / "train.idx").write_bytes(MMAP + struct.pack("<QBQ3i3q", 1, 8, 3, *sizes, *begins))


def _header(folder: Path, draw: random.Random) -> None:
    """Any type, version and number of samples."""
    _valid(folder, draw)
    count = draw.choice([*HUGE, 0])
    if draw.random() < 0.5:
        header = MMAP + struct.pack("<QBQ", draw.choice([1, 2, 2**63]), draw.randrange(256), count)
    else:
        width, sizes = draw.choice([0, 1, 4, 8, 2**63]), draw.choice([count, 0, 1])
        header = TORCHNET + struct.pack("<5Q", 1, draw.choice([0, 4, 6, 7, 99]), width, count, sizes)
    (folder / "train.idx").write_bytes(header + bytes(draw.choice([0, 8, 24, 4096])))


def _padding(folder: Path, draw: random.Random) -> None:
    """Nothing but padding, in one sample or in thousands."""
    write_dictionary(folder / "dict.txt", ["a", "b"])
    total = 20_000_000
    lengths = np.full(draw.choice([1, 2, 1000]), 0, "<i4")
    lengths[:] = total // len(lengths)
    begins = np.append(0, np.cumsum(lengths[:-1], dtype=np.int64)).astype("<i8")
    header = MMAP + struct.pack("<QBQ", 1, 1, len(lengths))
    (folder / "train.idx").write_bytes(header + lengths.tobytes() + begins.tobytes())
    (folder / "train.bin").write_bytes(b"\1" * int(lengths.sum()))


def _no_file(folder: Path, draw: random.Random) -> None:
    """A pipe that nobody writes to, a device without end, a folder, or a link to itself, in place of a file."""
    _valid(folder, draw)
    path = folder / draw.choice(["train.idx", "train.bin", "dict.txt"])
    path.unlink()
    kind = draw.choice(["pipe", "zero", "folder", "itself", "outside"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"zero": "/dev/zero", "itself": path.name, "outside": "/etc/passwd"}[kind])


def _dictionary(folder: Path, draw: random.Random) -> None:
    _valid(folder, draw)
    lines = [
        b"a 9" + b"9" * draw.choice([20, 5000, 1_000_000]),
        b"a " + b"x" * draw.choice([100, 50_000_000]),
        b"x" * 50_000_000 + b" 1\n" + b"x" * 50_000_000 + b" 1",
        b"a -5",
        b"a 1\na 2",
        b"\xff\xfe 3",
        b"\0 1\nb\0 2",
        b"a 1 #fairseq:overwrite\n" * 100_000,
        b"".join(b"w%d 1\n" % number for number in range(1_000_000)),
        b"",
        b"\n\n\n",
        "a \N{ARABIC-INDIC DIGIT THREE}\n\u202eb 1".encode(),
    ]
    (folder / "dict.txt").write_bytes(draw.choice(lines) + b"\n")


def _names(folder: Path, draw: random.Random) -> None:
    """Names of files with languages that lead elsewhere, or that act on a terminal."""
    _valid(folder, draw)
    for name in draw.sample(["\x1b[31m", "\n", "..", "~", "$HOME", "-", "e" * 100, "\u202e"], 2):
        for path in (
            folder / f"train.{name}-en.{name}.idx",
            folder / f"train.{name}-en.en.idx",
            folder / f"{name}.idx",
        ):
            write_mmap(path.with_suffix(""), [[4, EOS]])


FOLDERS: dict[str, Write] = {
    "files that are cut": _cut,
    "numbers of an index that are others": _damaged,
    "lengths whose sum overflows": _lengths,
    "sizes and places outside of the file": _sizes,
    "types, versions and numbers of samples": _header,
    "nothing but padding": _padding,
    "pipes, devices and links": _no_file,
    "dictionaries": _dictionary,
    "names of files": _names,
}


# ---------------------------------------------------------------------- checkpoints


def _options(folder: Path, draw: random.Random) -> None:
    """Some options of the model or of its training are anything."""
    contents = _contents(draw)
    options = _groups(contents)
    for _ in range(draw.choice([1, 1, 2])):
        group = draw.choice(options)
        group[draw.choice(sorted(group))] = draw.choice(VALUES)
    _write(folder, contents)


def _weights(folder: Path, draw: random.Random) -> None:
    """Weights that are missing, of another shape or type, not finite, or of layers that there are not."""
    contents = _contents(draw)
    state = contents["model"]
    for _ in range(draw.choice([1, 1, 2])):
        name = draw.choice(sorted(state))
        value = state[name]
        kind = draw.choice(["missing", "empty", "scalar", "turned", "type", "nan", "layer", "text"])
        if kind == "missing":
            del state[name]
        elif kind == "layer":
            state[f"{draw.choice(['encoder', 'decoder'])}.layers.{draw.choice([7, 10**9, 10**30, -1])}.fc1.weight"] = (
                value
            )
        else:
            new = {
                "empty": value[:0] if value.dim() else value,
                "scalar": torch.zeros(()),
                "turned": value.T,
                "text": "x",
            }
            new |= {"type": value.to(torch.complex64), "nan": value * float("nan")}
            state[name] = new[kind]
    _write(folder, contents)


def _languages(folder: Path, draw: random.Random) -> None:
    """Languages and data folders that lead out of the checkpoint's folder."""
    contents = _contents(draw)
    (folder / "dict.x").mkdir()
    for group in _groups(contents):
        for name in ("source_lang", "target_lang"):
            if name in group:
                group[name] = draw.choice(
                    ["x/../../../../etc/passwd", "../x", "x/../secret", "\0", "l" * 5000, 7, None]
                )
        if "data" in group:
            group["data"] = draw.choice(["/", "/dev", "/proc/self", ":" * 1000, ["/dev"] * 1000, "\0", 3])
    _write(folder, contents)
    (folder / "secret.txt").write_text("secret 1\n")


def _texts(folder: Path, draw: random.Random) -> None:
    """Dictionaries and codes beside a checkpoint that are none."""
    _write(folder, _contents(draw))
    path = folder / draw.choice(["dict.src.txt", "dict.tgt.txt", "bpecodes"])
    path.unlink(missing_ok=True)
    if draw.random() < 0.3:
        os.mkfifo(path)
        return
    contents = [b"#version: " + b"9" * 5000 + b".1\na b\n", b"a b c\n", b"\xff", b"", b"x" * 50_000_000]
    path.write_bytes(draw.choice([*contents, b"a " + b"9" * 5000 + b"\n"]))


def _contents(draw: random.Random) -> dict[str, Any]:
    return read_pickle(CHECKPOINTS / draw.choice(["main_dynamic_glu.pt", "legacy_dynamic_glu.pt"]))


def _groups(contents: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of a checkpoint, as mappings that can be changed."""
    if isinstance(contents.get("args"), argparse.Namespace):
        return [vars(contents["args"])]
    return [group for group in contents["cfg"].values() if isinstance(group, dict) and group]


def _write(folder: Path, contents: dict[str, Any]) -> None:
    for name in ("dict.src.txt", "dict.tgt.txt"):
        shutil.copy(CHECKPOINTS / name, folder / name)
    torch.save(contents, folder / "checkpoint.pt")


IMPORTED: dict[str, Write] = {
    "options of a checkpoint": _options,
    "weights of a checkpoint": _weights,
    "languages and folders of a checkpoint": _languages,
    "dictionaries and codes beside a checkpoint": _texts,
}


# ---------------------------------------------------------------------- the part


def hostile(folder: Path, count: int, seed: int) -> Iterator[Result]:
    """count: inputs of each kind."""
    for kind, write in (*FOLDERS.items(), *IMPORTED.items()):
        answers: Counter[str] = Counter()
        wrong = []
        for number in range(count):
            place = folder / "input"
            place.mkdir()
            draw = random.Random(f"{seed} {kind} {number}")
            apart(lambda write=write, place=place, draw=draw: write(place, draw))  # this process stays small
            answer = _answer(kind, place)
            answers[answer] += answer in ("read", "refused")
            wrong += [] if answer in ("read", "refused") else [f"number {number}: {answer}"]
            shutil.rmtree(place)
        yield outcome("hostile", {"what": kind}, {"tried": count, **{k: v for k, v in answers.items() if v}}, wrong)


def _answer(kind: str, place: Path) -> str:
    """read, refused, or what is wrong with the answer."""
    if kind in IMPORTED:
        words = ["import", str(place / "checkpoint.pt"), "--out", str(place / "run")]
    else:
        words = ["data", "stats", str(place)]
    child = Child(words, _limit_memory)
    try:
        ended = child.wait(SECONDS)
    except TimeoutError:
        child.log.close()
        os.waitpid(child.pid, 0)
        return f"not over after {SECONDS:g} seconds"
    if not ended.is_clear or "out of memory" in ended.last or len(ended.last) > LINE:
        return f"code {ended.code}: {ended.last[:200]}"
    return "refused" if ended.code else "read"


def _limit_memory() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
