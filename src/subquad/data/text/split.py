"""Divides one file into training, validation and test data.

A text is cut in its order: its last parts are held out, since lines of one passage in two splits would tell a model
what it is tested on. The rows of a table belong to no order and can be shuffled first.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from subquad.data.stable_rng import StableRng
from subquad.data.text.files import MAX_LINE_BYTES, read_lines
from subquad.data.text.reading import ReadingReport
from subquad.data.text.tables import csv_rows
from subquad.files import write_files

SPLITS = ("train", "valid", "test")
HELD_OUT = 0.05
"""The share of the records of each of the two splits that are held out."""
KINDS = (".txt", ".tsv", ".csv", ".jsonl")


def split_file(
    path: Path, folder: Path, held_out: float = HELD_OUT, *, shuffle: bool = False, header: bool = False, seed: int = 0
) -> dict[str, int]:
    """Writes train, valid and test of `path` to a folder, as files of the same kind. Returns the records of each.

    held_out: the share of validation and of test data, each. shuffle: draw the records at random. header: the first
    record is a header, which all three files get.
    """
    if not 0 < held_out < 0.5:
        raise ValueError(f"{held_out} of the records for validation, and as many for testing, leave none for training")
    name = path.with_suffix("") if path.suffix in (".gz", ".xz", ".bz2") else path
    kind = name.suffix if name.suffix in KINDS else ".txt"
    count = sum(1 for _ in _records(path, kind)) - int(header)
    each = round(count * held_out)
    if each < 1:
        raise ValueError(f"{path} has {count:,} records: too few to hold out {held_out:.0%} of them")
    owner = np.repeat(np.arange(3), [count - 2 * each, each, each])
    if shuffle:
        owner = owner[StableRng(seed).permutation(count)]
    files = {split: folder / f"{split}{kind}" for split in SPLITS}
    if taken := next((file for file in files.values() if file.exists()), None):
        raise ValueError(f"{taken} exists already; give another --out, or remove it")
    folder.mkdir(parents=True, exist_ok=True)

    def write(file: Path, wanted: int) -> None:
        with file.open("w", encoding="utf-8", newline="") as stream:
            for number, record in enumerate(_records(path, kind), -int(header)):
                if number < 0 or owner[number] == wanted:
                    stream.write(f"{record}\n")

    write_files({file: lambda target, n=n: write(target, n) for n, file in enumerate(files.values())})  # type: ignore[misc]
    return {split: int((owner == number).sum()) for number, split in enumerate(SPLITS)}


def _records(path: Path, kind: str) -> Iterator[str]:
    """The lines of a file; of a CSV table its rows, which may have several lines."""
    if kind != ".csv":
        yield from read_lines(path)
        return
    for _, row in csv_rows(str(path), MAX_LINE_BYTES, None, ReadingReport()):
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="").writerow(row)
        yield text.getvalue()
