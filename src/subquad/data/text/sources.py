"""Where text comes from: parallel text files, one for each field of a sample, or a table with a column for each field.

Files may be compressed with gzip, whatever their names are. A line ends with "\\n" or "\\r\\n" and nothing else: what
other programs take for line ends (U+2028, form feeds) is a part of the line. Errors name the file and the line.
"""

import csv
import gzip
import itertools
import json
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from pydantic import Field, model_validator

from subquad.config import Options, nearest
from subquad.data.fairseq.index import INDEX, data_path
from subquad.data.hub import HUB, load_hub
from subquad.files import checksum, digest
from subquad.packages import require

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 32 << 20
"""The default limit of a line. Lines are held in memory, where tokenizing them takes many times their size, and a gzip
file of 200 KB can hold a line of 200 MB."""
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
    """The files of a split. A string stands for one file, and a list of strings for several."""

    files: tuple[str, ...] = Field(
        min_length=1,
        description="One text file for each field, or one file of token ids for each (.npy, .npz or fairseq's .idx), "
        "or one table, or hub:NAME for a data set of the Hugging Face hub.",
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
        # An index of fairseq's has its token ids in a second file beside it.
        data_files = [str(data_path(path)) for path in self.files if self.is_ids and path.endswith(INDEX)]
        return [file_record(path, known) for path in [*self.files, *data_files]]


def file_record(path: str | Path, known: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Returns path, size, modification time and SHA-256 of a file.

    The file is read only if no record in `known` has the same path, size and modification time.
    """
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        several = "; write several files as a list: [a, b]" if "," in str(path) else ""
        raise ValueError(f"{path}: there is no such file{several}") from None
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is a folder, but a file is needed")
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end, and it is read more than once
        raise ValueError(f"{path} is a pipe or a device, but a file is needed")
    quick = {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    for record in known:
        if all(record.get(key) == value for key, value in quick.items()) and "sha256" in record:
            return {**quick, "sha256": record["sha256"]}
    return {**quick, "sha256": checksum(Path(path))}


class ReadCounter:
    """Counts the bytes that were read from disk, over all files that are opened with it."""

    def __init__(self) -> None:
        self._closed = 0
        self._open: list[IO[bytes]] = []

    def enter(self, file: IO[bytes]) -> None:
        self._open.append(file)

    def leave(self, file: IO[bytes]) -> None:
        self._open.remove(file)
        if not file.closed:  # a reader that an error left behind may be garbage-collected after its file
            self._closed += file.tell()

    @property
    def bytes(self) -> int:
        return self._closed + sum(file.tell() for file in self._open)


def read_samples(
    source: TextSource, fields: Sequence[str], counter: ReadCounter | None = None
) -> Iterator[tuple[str, ...]]:
    """Yields samples, which are tuples with one string for each of `fields`. A source without samples is an error."""
    if source.is_ids:
        raise ValueError(f"{source.files[0]} holds token ids, but text is needed")
    if source.is_hub or source.kind != "text":
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


def read_lines(path: str | Path, counter: ReadCounter | None = None, max_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yields the lines of a text file without their ends. Long lines and invalid UTF-8 are errors with their number."""
    for number, raw in enumerate(_raw_lines(path, counter, max_bytes), 1):
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not UTF-8, byte {error.start + 1} is 0x{raw[error.start]:02x}; "
                "convert the file, for example with iconv"
            ) from None
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix("\ufeff") if number == 1 else line


def _raw_lines(path: str | Path, counter: ReadCounter | None, max_bytes: int) -> Iterator[bytes]:
    with _open_file(path, counter) as file:
        try:
            number = 0
            while line := file.readline(max_bytes + 1):  # no more of a longer line is read, or unpacked
                number += 1
                if len(line) > max_bytes:
                    raise ValueError(_too_long(path, number, max_bytes))
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def _too_long(path: str | Path, number: int, max_bytes: int) -> str:
    return f"{path}, line {number}: longer than {max_bytes:,} bytes; split it, or raise max_line_bytes"


@contextmanager
def _open_file(path: str | Path, counter: ReadCounter | None) -> Iterator[IO[bytes]]:
    try:
        raw = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, but a file is needed") from None
    with raw:
        if counter is not None:
            counter.enter(raw)
        try:
            # Text in UTF-8 cannot begin with these two bytes, so nothing else is taken for gzip.
            is_gzip = raw.peek(2)[:2] == GZIP_MAGIC
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_gzip else raw
        finally:
            if counter is not None:
                counter.leave(raw)


def _parallel_samples(source: TextSource, counter: ReadCounter | None) -> Iterator[tuple[str, ...]]:
    limit = source.max_line_bytes
    for sample in itertools.zip_longest(*(read_lines(path, counter, limit) for path in source.files)):
        if None in sample:
            counts = [f"{path} has {sum(1 for _ in read_lines(path, None, limit)):,} lines" for path in source.files]
            raise ValueError(f"parallel files need the same number of lines: {', '.join(counts)}")
        yield sample


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
                raise ValueError(_too_long(path, reader.line_num + 1, most))
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
