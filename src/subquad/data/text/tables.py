"""Tables of text: TSV, CSV, JSONL and parquet files as rows, and the text in their cells."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.config import nearest
from subquad.data.text.files import ReadCounter, read_lines_with_gaps, too_long
from subquad.data.text.reading import ReadingReport, is_header
from subquad.packages import require

Row = tuple[str, Any]
"""The place of a row, for messages, and its content: a list of columns, or a mapping from names to values."""
CARRIAGE_RETURN = "\ud800"
"""Stands for a carriage return while a line is split: half of a surrogate pair is in no text that was UTF-8."""


def cell_text(place: str, row: Any, column: int | str) -> str:
    """Returns the text in a column. Names may lead into nested mappings: "translation.de"."""
    if isinstance(row, Mapping):
        value = look_up(place, row, column)
    else:
        assert isinstance(column, int)
        if column > len(row):
            raise ValueError(f"{place}: there is no column {column}, only {len(row)}")
        value = row[column - 1]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{place}: column {column} holds {value!r}, but text is needed")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{place}: column {column} holds half of a surrogate pair, which is no valid text")
    return value


def look_up(place: str, row: Mapping[str, Any], column: int | str) -> Any:
    """Returns the value in a column of a mapping, by name or by number from 1."""
    if isinstance(column, int):
        if column > len(row):
            raise ValueError(f"{place}: there is no column {column}, only {len(row)}: {', '.join(row)}")
        return list(row.values())[column - 1]
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    if inner and isinstance(row.get(outer), Mapping):
        return look_up(place, row[outer], inner)
    raise ValueError(f"{place}: there is no column {column!r}{nearest(column, row)} It has {', '.join(map(str, row))}.")


def delimited_rows(
    path: str,
    rows: Iterator[tuple[str, list[str]]],
    wanted: Sequence[int | str],
    header: bool | None,
    report: ReadingReport,
) -> Iterator[Row]:
    """Yields the rows of a TSV or CSV file, as mappings if it has a header.

    wanted: the columns that will be read. header: None if nobody said whether there is one.
    """
    named = any(isinstance(column, str) for column in wanted)
    if named and header is False:
        raise ValueError(f"{path}: without a header its columns are numbers from 1, got {list(wanted)}")
    first = next(rows, None)
    if first is None:
        return
    place, names = first
    if not (named if header is None else header):
        cells = [names[column - 1] for column in wanted if isinstance(column, int) and column <= len(names)]
        if header is None and len(cells) == len(wanted) and is_header(cells):
            report.add_header(place, names)
        else:
            yield place, names
        yield from rows
        return
    if len(set(names)) < len(names):
        raise ValueError(f"{place}: two columns have the same name; give header=false and numbers")
    for column in wanted:
        look_up(place, dict.fromkeys(names), column)  # a name that is wrong is wrong in every row
    for place, row in rows:
        if len(row) != len(names):
            report.add_error(ValueError(f"{place}: {len(row)} columns, but the header names {len(names)}"))
        else:
            yield place, dict(zip(names, row, strict=True))


def tsv_rows(
    path: str, max_bytes: int, counter: ReadCounter | None, report: ReadingReport
) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(read_lines_with_gaps(path, report.add_error, counter, max_bytes), 1):
        if line is not None:
            yield f"{path}, line {number}", line.split("\t")


def csv_rows(
    path: str, max_bytes: int, counter: ReadCounter | None, report: ReadingReport
) -> Iterator[tuple[str, list[str]]]:
    """Yields the rows of a CSV file. A row ends with its line, unless that is in quotes; a bare \\r is text."""
    # The limit of a field is one of the whole process, and other packages read tables too: it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), max_bytes + 1))
    lines = _CsvLines(path, max_bytes, counter, report)
    reader = csv.reader(lines, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            report.add_error(ValueError(f"{path}, line {lines.number}: not CSV, {error}"))
        except ValueError as error:  # of a row that is too long
            report.add_error(error)
        else:
            yield f"{path}, line {lines.number}", [cell.replace(CARRIAGE_RETURN, "\r") for cell in row]
        lines.row_bytes = 0


class _CsvLines:
    """The lines of a CSV file. A field in quotes may have many of them, so their limit is also one of a whole row."""

    def __init__(self, path: str, max_bytes: int, counter: ReadCounter | None, report: ReadingReport) -> None:
        self.path, self.max_bytes, self.row_bytes, self.number = path, max_bytes, 0, 0
        self.lines = read_lines_with_gaps(path, report.add_error, counter, max_bytes)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = None
        while line is None:
            self.number, line = self.number + 1, next(self.lines)
        self.row_bytes += len(line) + 1
        if self.row_bytes > self.max_bytes + 1:
            raise ValueError(too_long(self.path, self.number, self.max_bytes))
        return line.replace("\r", CARRIAGE_RETURN) + "\n"


def json_rows(path: str, max_bytes: int, counter: ReadCounter | None, report: ReadingReport) -> Iterator[Row]:
    for number, line in enumerate(read_lines_with_gaps(path, report.add_error, counter, max_bytes), 1):
        if line is None:
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, or a number of thousands of digits
            report.add_error(ValueError(f"{place}: not JSON, {error}"))
            continue
        if isinstance(row, Mapping):
            yield place, row
        else:
            report.add_error(ValueError(f"{place}: a JSON object is needed, got {line[:40]}"))


def parquet_rows(path: str) -> Iterator[Row]:
    parquet = require("pyarrow.parquet", f"{path}: parquet", "hub")
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    arrow = require("pyarrow", f"{path}: parquet", "hub")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (OSError, OverflowError, arrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}") from None
