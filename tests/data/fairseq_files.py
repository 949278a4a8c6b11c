"""Data folders as fairseq-preprocess writes them, made number by number."""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

Samples = Sequence[Sequence[int]]

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H", 9: "I", 10: "Q"}
"""The types of fairseq's codes, as `struct` spells them."""
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
EOS = 2


def packed(letter: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{letter}", *numbers)


def write_mmap(stem: Path, samples: Samples, code: int = 8) -> None:
    """The form of fairseq since 2019."""
    width = struct.calcsize(LETTERS[code])
    lengths = [len(sample) for sample in samples]
    begins = [0, *accumulate(width * length for length in lengths)][:-1]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, len(samples))
    Path(f"{stem}.idx").write_bytes(header + packed("i", lengths) + packed("q", begins))
    Path(f"{stem}.bin").write_bytes(b"".join(packed(LETTERS[code], sample) for sample in samples))


def write_torchnet(stem: Path, samples: Samples, code: int = 4) -> None:
    """The form before that, whose numbers begin with one."""
    width = struct.calcsize(LETTERS[code])
    lengths = [len(sample) for sample in samples]
    header = b"TNTIDX\x00\x00" + struct.pack("<QQQQQ", 1, code, width, len(samples), len(samples))
    index = packed("q", range(len(samples) + 1)) + packed("q", [0, *accumulate(lengths)]) + packed("q", lengths)
    Path(f"{stem}.idx").write_bytes(header + index)
    content = (packed(LETTERS[code], [number + 1 for number in sample]) for sample in samples)
    Path(f"{stem}.bin").write_bytes(b"".join(content))


FORMS: dict[str, Callable[..., None]] = {"mmap": write_mmap, "torchnet": write_torchnet}


def write_dictionary(path: Path, words: Sequence[str]) -> dict[str, int]:
    """A dict.txt; returns the numbers of its words."""
    path.write_text("".join(f"{word} {9 - i % 9}\n" for i, word in enumerate(words)))
    return {word: number for number, word in enumerate((*SPECIAL, *words))}


def numbered(lines: Sequence[str], numbers: dict[str, int]) -> list[list[int]]:
    """Lines as fairseq binarises them, with their end."""
    return [[*(numbers.get(word, 3) for word in line.split()), EOS] for line in lines]
