"""Where text comes from: parallel text files, one for each field of a sample, or a table with a column for each field.

Labelled texts may also be a folder that has a folder for each class, with a file for each text. `files.py` says what a
line is, and that files may be compressed. Errors name the file and the line.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from subquad.config import Options, nearest
from subquad.data.fairseq.index import INDEX, data_path
from subquad.data.hub import HUB, load_hub
from subquad.data.text.files import MAX_LINE_BYTES, ReadCounter, file_record, read_lines, too_long
from subquad.data.text.folders import folder_record, read_class_folders
from subquad.files import digest
from subquad.packages import require

Format = Literal["text", "tsv", "csv", "jsonl", "parquet", "ids", "folder"]
SUFFIXES: dict[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "ids",
    ".npz": "ids",
    INDEX: "ids",
}

LABELLED = ("label", "text")
"""The fields of labelled texts, which may come from a folder."""


class TextSource(Options):
    """The files of a split. A string stands for one file, and a list of strings for several."""

    files: tuple[str, ...] = Field(
        min_length=1,
        description="One text file for each field, or one file of token ids for each (.npy, .npz or fairseq's .idx), "
        "or one table, or for labelled texts one folder that has a folder for each class with a file for each text, or "
        "hub:NAME for a data set of the Hugging Face hub.",
    )
    columns: tuple[int | str, ...] = Field(
        (), description="The columns of a table, by name or by number from 1. By default the first columns are used."
    )
    format: Format | None = Field(None, description="The format of the files. By default their names decide.")
    header: bool | None = Field(
        None,
        description="Whether a TSV or CSV file begins with the names of its columns. By default it does if `columns` "
        "has names.",
    )
    max_line_bytes: int = Field(
        MAX_LINE_BYTES,
        ge=1,
        description="The longest line, or field of a CSV file, in bytes. A longer one is an error.",
    )
    subset: str | None = Field(None, description="The configuration of a hub data set.")
    split: str | None = Field(None, description="The split of a hub data set, such as train or test[:1000].")

    @model_validator(mode="before")
    @classmethod
    def _from_paths(cls, given: Any) -> Any:
        if isinstance(given, str | Path):
            given = [given]
        return {"files": [str(path) for path in given]} if isinstance(given, Sequence) else given

    @property
    def is_hub(self) -> bool:
        return self.files[0].startswith(HUB)

    @property
    def is_ids(self) -> bool:
        """Whether the files hold token ids instead of text."""
        return not self.is_hub and self.kind == "ids"

    @property
    def kind(self) -> Format:
        """The format of the files."""
        if self.format is None and Path(self.files[0]).is_dir():
            return "folder"
        name = Path(self.files[0]).name.lower().removesuffix(".gz")
        return self.format or SUFFIXES.get(Path(name).suffix, "text")

    def check(self) -> None:
        if self.is_hub:
            if len(self.files) > 1 or self.split is None:
                raise ValueError(f"{self.files[0]}: a hub data set is one name with a split, such as split=train")
        elif self.subset is not None or self.split is not None:
            raise ValueError(f"subset and split belong to hub data sets ({HUB}NAME), not to files")
        elif self.kind == "folder" and len(self.files) > 1:
            raise ValueError(
                f"{self.files[0]} is a folder, but files are needed; a folder of labelled texts stands alone"
            )
        elif self.kind not in ("text", "ids") and len(self.files) > 1:
            raise ValueError(f"{self.files[0]}: a {self.kind} table is one file; its columns are the fields")
        if any(isinstance(column, int) and column < 1 for column in self.columns):
            raise ValueError(f"columns are numbered from 1, got {list(self.columns)}")

    def check_folder(self, fields: Sequence[str]) -> None:
        """Refuses a folder where samples are not labelled texts."""
        if not self.is_hub and self.kind == "folder" and tuple(fields) != LABELLED:
            raise ValueError(f"{self.files[0]} is a folder, but a file is needed")

    def reading_options(self) -> dict[str, Any]:
        """Returns how the files are read: all options that change the samples, so neither paths nor limits."""
        return {**self.model_dump(mode="json", exclude={"files", "max_line_bytes"}), "format": self.kind}

    def content_records(self, known: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Returns a record of the content of each file (see `file_record`), or one record for a hub data set."""
        if self.is_hub:
            data_set = load_hub(self.files[0], self.subset, self.split)
            content = {"rows": len(data_set), "cache": str(getattr(data_set, "_fingerprint", ""))}
            return [{"path": self.files[0], "size": 0, "sha256": digest(content)}]
        known = list(known)
        if self.kind == "folder":
            return [folder_record(Path(self.files[0]), known)]
        # An index of fairseq's has its token ids in a second file beside it.
        data_files = [str(data_path(path)) for path in self.files if self.is_ids and path.endswith(INDEX)]
        return [file_record(path, known) for path in [*self.files, *data_files]]


def read_samples(
    source: TextSource, fields: Sequence[str], counter: ReadCounter | None = None
) -> Iterator[tuple[str, ...]]:
    """Yields samples, which are tuples with one string for each of `fields`. A source without samples is an error."""
    if source.is_ids:
        raise ValueError(f"{source.files[0]} holds token ids, but text is needed")
    if source.kind == "folder" and not source.is_hub:
        samples = _folder_samples(source, fields, counter)
    elif source.is_hub or source.kind != "text":
        samples = _table_samples(source, fields, counter)
    elif source.columns or source.header is not None:
        raise ValueError(f"{source.files[0]} is plain text; columns and header need format=tsv, csv, jsonl or parquet")
    elif len(source.files) != len(fields):
        files = ", ".join(source.files)
        raise ValueError(
            f"{len(fields)} text files are needed ({', '.join(fields)}) or one table (format=tsv, ...); got {files}"
        )
    else:
        samples = _parallel_samples(source, counter)
    first = next(samples, None)
    if first is None:
        raise ValueError(f"{', '.join(source.files)}: empty, there are no samples")
    yield first
    yield from samples


def _parallel_samples(source: TextSource, counter: ReadCounter | None) -> Iterator[tuple[str, ...]]:
    limit = source.max_line_bytes
    for sample in itertools.zip_longest(*(read_lines(path, counter, limit) for path in source.files)):
        if None in sample:
            counts = [f"{path} has {sum(1 for _ in read_lines(path, None, limit)):,} lines" for path in source.files]
            raise ValueError(f"parallel files need the same number of lines: {', '.join(counts)}")
        yield sample


def _folder_samples(
    source: TextSource, fields: Sequence[str], counter: ReadCounter | None
) -> Iterator[tuple[str, ...]]:
    source.check_folder(fields)
    if source.columns or source.header is not None:
        raise ValueError(f"{source.files[0]} is a folder of classes; columns and header belong to tables")
    return read_class_folders(Path(source.files[0]), counter, source.max_line_bytes)


# ---------------------------------------------------------------------- tables

Row = tuple[str, Any]
"""The place of a row, for messages, and its content: a list of columns, or a mapping from names to values."""


def _table_samples(source: TextSource, fields: Sequence[str], counter: ReadCounter | None) -> Iterator[tuple[str, ...]]:
    columns = source.columns
    if columns and len(columns) != len(fields):
        needed = f"{len(fields)} columns are needed ({', '.join(fields)})"
        raise ValueError(f"{source.files[0]}: {needed}, got {len(columns)}")
    if source.is_hub:
        rows = _hub_rows(source)
    elif source.kind == "jsonl":
        rows = _json_rows(source, counter)
    elif source.kind == "parquet":
        rows = _parquet_rows(source.files[0])
    else:
        rows = _delimited_rows(source, counter)
    wanted = columns or tuple(range(1, len(fields) + 1))
    for place, row in rows:
        yield tuple(_cell_text(place, row, column) for column in wanted)


def _cell_text(place: str, row: Any, column: int | str) -> str:
    """Returns the text in a column. Names may lead into nested mappings: "translation.de"."""
    if isinstance(row, Mapping):
        value = _look_up(place, row, column)
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


def _look_up(place: str, row: Mapping[str, Any], column: int | str) -> Any:
    if isinstance(column, int):
        if column > len(row):
            raise ValueError(f"{place}: there is no column {column}, only {len(row)}: {', '.join(row)}")
        return list(row.values())[column - 1]
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    if inner and isinstance(row.get(outer), Mapping):
        return _look_up(place, row[outer], inner)
    raise ValueError(f"{place}: there is no column {column!r}{nearest(column, row)} It has {', '.join(map(str, row))}.")


def _delimited_rows(source: TextSource, counter: ReadCounter | None) -> Iterator[Row]:
    path = source.files[0]
    named = any(isinstance(column, str) for column in source.columns)
    if named and source.header is False:
        raise ValueError(f"{path}: without a header its columns are numbers from 1, got {list(source.columns)}")
    rows = _csv_rows(source, counter) if source.kind == "csv" else _tsv_rows(source, counter)
    if not (named if source.header is None else source.header):
        yield from rows
        return
    place, names = next(rows, (path, []))
    if len(set(names)) < len(names):
        raise ValueError(f"{place}: two columns have the same name; give header=false and numbers")
    for place, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{place}: {len(row)} columns, but the header names {len(names)}")
        yield place, dict(zip(names, row, strict=True))


def _tsv_rows(source: TextSource, counter: ReadCounter | None) -> Iterator[tuple[str, list[str]]]:
    path = source.files[0]
    for number, line in enumerate(read_lines(path, counter, source.max_line_bytes), 1):
        yield f"{path}, line {number}", line.split("\t")


def _csv_rows(source: TextSource, counter: ReadCounter | None) -> Iterator[tuple[str, list[str]]]:
    path, most, row_bytes = source.files[0], source.max_line_bytes, 0

    def lines() -> Iterator[str]:
        """The lines of the file. A field in quotes may have many of them, so the limit is also one of a whole row."""
        nonlocal row_bytes
        for line in read_lines(path, counter, most):
            row_bytes += len(line) + 1
            if row_bytes > most + 1:
                raise ValueError(too_long(path, reader.line_num + 1, most))
            yield line + "\n"

    # The limit of a field is one of the whole process, and other packages read tables too: it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), most + 1))
    reader = csv.reader(lines(), strict=True)
    try:
        for row in reader:
            row_bytes = 0
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV, {error}") from None


def _json_rows(source: TextSource, counter: ReadCounter | None) -> Iterator[Row]:
    path = source.files[0]
    for number, line in enumerate(read_lines(path, counter, source.max_line_bytes), 1):
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, or a number of thousands of digits
            raise ValueError(f"{place}: not JSON, {error}") from None
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: a JSON object is needed, got {line[:40]}")
        yield place, row


def _parquet_rows(path: str) -> Iterator[Row]:
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


def _hub_rows(source: TextSource) -> Iterator[Row]:
    for number, row in enumerate(load_hub(source.files[0], source.subset, source.split), 1):
        yield f"{source.files[0]}, sample {number}", row
