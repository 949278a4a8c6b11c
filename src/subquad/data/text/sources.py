"""Where text comes from: parallel text files, one for each field of a sample, or one table with a column for each.

Files may be compressed with gzip, whatever they are called. A line ends with "\\n" or "\\r\\n" and with nothing else:
what other programs take for line ends (U+2028, form feeds) stays inside. Mistakes name the file and the line.
"""

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from pydantic import Field, model_validator

from subquad.config import Options, nearest
from subquad.data.fairseq.index import INDEX, data_path
from subquad.data.hub import HUB, load_hub
from subquad.packages import require

GZIP_MAGIC = b"\x1f\x8b"
MOST_LINE = 1 << 30
"""Bytes of a line, which is held in memory: a gzip file of a megabyte can have one of a gigabyte."""
Format = Literal["text", "tsv", "csv", "jsonl", "parquet", "ids"]
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


class TextSource(Options):
    """Files of samples. A string is one file, a list of strings is several."""

    files: tuple[str, ...] = Field(
        min_length=1,
        description="one text file (or .npy, .npz, fairseq's .idx of token numbers) for each field, one table, or "
        "hub:NAME for a data set of the hub",
    )
    columns: tuple[int | str, ...] = Field(
        (), description="of a table: a name or a number from 1 for each field; default: the first ones"
    )
    format: Format | None = Field(None, description="default: by the name of the file")
    header: bool | None = Field(
        None, description="whether a TSV or CSV file begins with names of columns; default: when columns are named"
    )
    subset: str | None = Field(None, description="configuration of a hub data set")
    split: str | None = Field(None, description="split of a hub data set, such as train or test[:1000]")

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
        """Whether the files hold numbers of tokens instead of text."""
        return not self.is_hub and self.kind == "ids"

    @property
    def contents(self) -> list[str]:
        """All files that are read: an index of fairseq's has its numbers beside it."""
        beside = [str(data_path(path)) for path in self.files if self.is_ids and path.endswith(INDEX)]
        return [*self.files, *beside]

    @property
    def kind(self) -> Format:
        """The format of the files."""
        name = Path(self.files[0]).name.lower().removesuffix(".gz")
        return self.format or SUFFIXES.get(Path(name).suffix, "text")

    def check(self) -> None:
        if self.is_hub:
            if len(self.files) > 1 or self.split is None:
                raise ValueError(f"{self.files[0]}: a hub data set is one name with a split, such as split=train")
        elif self.subset is not None or self.split is not None:
            raise ValueError(f"subset and split belong to hub data sets ({HUB}NAME), not to files")
        elif self.kind not in ("text", "ids") and len(self.files) > 1:
            raise ValueError(f"{self.files[0]}: a {self.kind} table is one file; its columns are the fields")
        if any(isinstance(column, int) and column < 1 for column in self.columns):
            raise ValueError(f"columns are numbered from 1, got {list(self.columns)}")


Spec = TextSource | Mapping[str, Any] | Sequence[str | Path] | str | Path


def as_source(spec: Spec) -> TextSource:
    """A source from what a user may write: a config, its options, one path or several."""
    if isinstance(spec, TextSource):
        return spec
    if isinstance(spec, Mapping):
        return TextSource.parse("source", spec)
    paths = [spec] if isinstance(spec, str | Path) else spec
    return TextSource.parse("source", {"files": [str(path) for path in paths]})


class Position:
    """How far reading has come: bytes taken from the disk, of all files opened with it."""

    def __init__(self) -> None:
        self._closed = 0
        self._open: list[IO[bytes]] = []

    def enter(self, file: IO[bytes]) -> None:
        self._open.append(file)

    def leave(self, file: IO[bytes]) -> None:
        self._open.remove(file)
        if not file.closed:  # a reader that an error left behind may be collected after its file
            self._closed += file.tell()

    @property
    def bytes(self) -> int:
        return self._closed + sum(file.tell() for file in self._open)


def read_pairs(spec: Spec) -> Iterator[tuple[str, str]]:
    """Pairs (source, target), from two parallel files or two columns."""
    return cast(Iterator[tuple[str, str]], read_samples(as_source(spec), ("source", "target")))


def read_labelled(spec: Spec) -> Iterator[tuple[str, str]]:
    """Pairs (label, text), from two parallel files or two columns."""
    return cast(Iterator[tuple[str, str]], read_samples(as_source(spec), ("label", "text")))


def read_samples(
    source: TextSource, fields: Sequence[str], position: Position | None = None
) -> Iterator[tuple[str, ...]]:
    """Samples with one string for each of `fields`. No samples at all is an error."""
    if source.is_ids:
        raise ValueError(f"{source.files[0]} holds numbers of tokens, where text is needed")
    if source.is_hub or source.kind != "text":
        samples = _table(source, fields, position)
    elif source.columns or source.header is not None:
        raise ValueError(f"{source.files[0]} is plain text; columns and header need format=tsv, csv, jsonl or parquet")
    elif len(source.files) != len(fields):
        files = ", ".join(source.files)
        raise ValueError(
            f"{len(fields)} text files are needed ({', '.join(fields)}) or one table (format=tsv, ...); got {files}"
        )
    else:
        samples = _parallel(source.files, position)
    first = next(samples, None)
    if first is None:
        raise ValueError(f"{', '.join(source.files)}: empty, there are no samples")
    yield first
    yield from samples


def read_lines(path: str | Path, position: Position | None = None) -> Iterator[str]:
    """Lines of a text file without their ends. Invalid UTF-8 is an error that names the line."""
    for number, raw in enumerate(_raw_lines(path, position), 1):
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not UTF-8, byte {error.start + 1} is 0x{raw[error.start]:02x}; "
                "convert the file, for example with iconv"
            ) from None
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix("\ufeff") if number == 1 else line


def _raw_lines(path: str | Path, position: Position | None) -> Iterator[bytes]:
    with _opened(path, position) as file:
        try:
            while line := file.readline(MOST_LINE):
                if len(line) == MOST_LINE:
                    raise ValueError(f"{path} has a line of more than {MOST_LINE:,} bytes")
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from None


@contextmanager
def _opened(path: str | Path, position: Position | None) -> Iterator[IO[bytes]]:
    try:
        raw = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, a file is needed") from None
    with raw:
        if position is not None:
            position.enter(raw)
        try:
            # The two bytes cannot begin a text in UTF-8, so nothing else is taken for gzip.
            packed = raw.peek(2)[:2] == GZIP_MAGIC
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
        finally:
            if position is not None:
                position.leave(raw)


def _parallel(files: Sequence[str], position: Position | None) -> Iterator[tuple[str, ...]]:
    readers = [read_lines(path, position) for path in files]
    for sample in itertools.zip_longest(*readers):
        if None in sample:
            counts = [f"{path} has {sum(1 for _ in read_lines(path)):,} lines" for path in files]
            raise ValueError(f"parallel files need the same number of lines: {', '.join(counts)}")
        yield sample


# ---------------------------------------------------------------------- tables

Row = tuple[str, Any]
"""Where it stands, for messages, and what it holds: a list of columns, or a mapping by name."""


def _table(source: TextSource, fields: Sequence[str], position: Position | None) -> Iterator[tuple[str, ...]]:
    columns = source.columns
    if columns and len(columns) != len(fields):
        needed = f"{len(fields)} columns are needed ({', '.join(fields)})"
        raise ValueError(f"{source.files[0]}: {needed}, got {len(columns)}")
    if source.is_hub:
        rows = _hub_rows(source)
    elif source.kind == "jsonl":
        rows = _json_rows(source.files[0], position)
    elif source.kind == "parquet":
        rows = _parquet_rows(source.files[0])
    else:
        rows = _delimited_rows(source, position)
    wanted = columns or tuple(range(1, len(fields) + 1))
    for where, row in rows:
        yield tuple(_cell(where, row, column) for column in wanted)


def _cell(where: str, row: Any, column: int | str) -> str:
    """The text of a column. A mapping is searched by name, also inside: "translation.de"."""
    if isinstance(row, Mapping):
        value = _look_up(where, row, column)
    else:
        assert isinstance(column, int)
        if column > len(row):
            raise ValueError(f"{where}: there is no column {column}, only {len(row)}")
        value = row[column - 1]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column} holds {value!r}, a text is needed")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: column {column} holds half a surrogate pair, which is no text")
    return value


def _look_up(where: str, row: Mapping[str, Any], column: int | str) -> Any:
    if isinstance(column, int):
        if column > len(row):
            raise ValueError(f"{where}: there is no column {column}, only {len(row)}: {', '.join(row)}")
        return list(row.values())[column - 1]
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    if inner and isinstance(row.get(outer), Mapping):
        return _look_up(where, row[outer], inner)
    raise ValueError(f"{where}: there is no column {column!r}{nearest(column, row)} It has {', '.join(map(str, row))}.")


def _delimited_rows(source: TextSource, position: Position | None) -> Iterator[Row]:
    path = source.files[0]
    named = any(isinstance(column, str) for column in source.columns)
    if named and source.header is False:
        raise ValueError(f"{path}: without a header its columns are numbers from 1, got {list(source.columns)}")
    rows = _csv_rows(path, position) if source.kind == "csv" else _tsv_rows(path, position)
    if not (named if source.header is None else source.header):
        yield from rows
        return
    where, names = next(rows, (path, []))
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: two columns have the same name; give header=false and numbers")
    for where, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{where}: {len(row)} columns, but the header names {len(names)}")
        yield where, dict(zip(names, row, strict=True))


def _tsv_rows(path: str, position: Position | None) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(read_lines(path, position), 1):
        yield f"{path}, line {number}", line.split("\t")


def _csv_rows(path: str, position: Position | None) -> Iterator[tuple[str, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # documents are longer than the module's default of 128 KB
    reader = csv.reader((line + "\n" for line in read_lines(path, position)), strict=True)
    try:
        for row in reader:
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV, {error}") from None


def _json_rows(path: str, position: Position | None) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path, position), 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, or a number of thousands of digits
            raise ValueError(f"{where}: not JSON, {error}") from None
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}: a JSON object is needed, got {line[:40]}")
        yield where, row


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
