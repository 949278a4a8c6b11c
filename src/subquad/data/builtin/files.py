"""Embedded sets as files, which are prepared like those of a user."""

import csv
import io
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from subquad.data.builtin import SPLITS, BuiltinSet
from subquad.files import write_files, write_text

EMBEDDED_KEY = "embedded.key"
"""The file that says which generated set is in the files beside it."""


def write_embedded(found: BuiltinSet, cache: Path) -> dict[str, Path]:
    """Writes the splits of an embedded set to files, unless they are there. Memory holds one sample at a time."""
    is_table = found.kind in ("pairs", "labelled")
    files = {split: cache / (f"{split}.csv" if is_table else f"{split}.txt") for split in SPLITS}
    key = cache / EMBEDDED_KEY
    if found.key is not None and key.exists() and key.read_text() == found.key:
        return files
    for split, path in files.items():
        samples = found.split(split)
        if not path.exists() or not _has_content(path, _encoded_rows(samples, is_table)):
            write_files({path: partial(_write_rows, rows=_encoded_rows(samples, is_table))})
    if found.key is not None:
        write_text(key, found.key)
    return files


def _encoded_rows(samples: Iterable[Any], is_table: bool) -> Iterator[bytes]:
    """Yields samples as rows of a CSV file, or as lines."""
    for sample in samples:
        row = io.StringIO(newline="")
        if is_table:
            csv.writer(row).writerow(sample)
        else:
            row.write(f"{sample}\n")
        yield row.getvalue().encode()


def _write_rows(path: Path, rows: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(rows)


def _has_content(path: Path, rows: Iterable[bytes]) -> bool:
    with path.open("rb") as file:
        return all(file.read(len(row)) == row for row in rows) and not file.read(1)
