"""Where text comes from: parallel text files, one for each field of a sample, or a table with a column for each field.

Labelled texts may also be a folder that has a folder for each class, with a file for each text. `files.py` says what a
line is, and that files may be compressed. Errors name the file and the line.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from subquad.config import Options
from subquad.data.fairseq.index import INDEX, data_path
from subquad.data.hub import HUB, load_hub
from subquad.data.text.files import MAX_LINE_BYTES, ReadCounter, file_record, read_lines_with_gaps
from subquad.data.text.folders import folder_record, read_class_folders
from subquad.data.text.reading import ReadingReport
from subquad.data.text.tables import Row, cell_text, csv_rows, delimited_rows, json_rows, parquet_rows, tsv_rows
from subquad.files import digest

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

END = object()
LABELLED = ("label", "text")
"""The fields of labelled texts, which may come from a folder."""


class TextSource(Options):
    """The files of a split. A string stands for one file, and a list of strings for several."""

    files: tuple[str, ...] = Field(
        min_length=1,
        description="One text file for each field, or one file of token ids for each (.npy, .npz or fairseq's .idx), "
        "or one table of text, or with `format: ids` of lists of token ids, or for labelled texts one folder that has "
        "a folder for each class with a file for each text, or hub:NAME for a data set of the Hugging Face hub.",
    )
    columns: tuple[int | str, ...] = Field(
        (), description="The columns of a table, by name or by number from 1. By default the first columns are used."
    )
    format: Format | None = Field(None, description="The format of the files. By default their names decide.")
    header: bool | None = Field(
        None,
        description="Whether a TSV or CSV file begins with the names of its columns. By default it does if `columns` "
        "has names, or if the first row has well-known ones such as de and en, which is said.",
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
        return self.format == "ids" if self.is_hub else self.kind == "ids"

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
    source: TextSource,
    fields: Sequence[str],
    counter: ReadCounter | None = None,
    report: ReadingReport | None = None,
) -> Iterator[tuple[str, ...]]:
    """Yields samples, which are tuples with one string for each of `fields`. A source without samples is an error.

    report: says whether samples that cannot be read are skipped, and gets what was noticed.
    """
    report = report or ReadingReport()
    if source.is_ids:
        raise ValueError(f"{source.files[0]} holds token ids, but text is needed")
    if source.kind == "folder" and not source.is_hub:
        samples = _folder_samples(source, fields, counter, report)
    elif source.is_hub or source.kind != "text":
        samples = _table_samples(source, fields, counter, report)
    elif source.columns or source.header is not None:
        raise ValueError(f"{source.files[0]} is plain text; columns and header need format=tsv, csv, jsonl or parquet")
    elif len(source.files) != len(fields):
        files = ", ".join(source.files)
        raise ValueError(
            f"{len(fields)} text files are needed ({', '.join(fields)}) or one table (format=tsv, ...); got {files}"
        )
    else:
        samples = _parallel_samples(source, counter, report)
    first = next(samples, None)
    if first is None:
        why = (
            f"none of {report.unreadable:,} samples can be read: {report.first_errors[0]}" if report.unreadable else ""
        )
        raise ValueError(f"{', '.join(source.files)}: {why or 'empty, there are no samples'}")
    yield first
    yield from samples


def _parallel_samples(
    source: TextSource, counter: ReadCounter | None, report: ReadingReport
) -> Iterator[tuple[str, ...]]:
    limit = source.max_line_bytes
    lines = (read_lines_with_gaps(path, report.add_error, counter, limit) for path in source.files)
    for sample in itertools.zip_longest(*lines, fillvalue=END):
        if END in sample:
            counts = [f"{path} has {_count_lines(path, limit):,} lines" for path in source.files]
            raise ValueError(f"parallel files need the same number of lines: {', '.join(counts)}")
        if None not in sample:
            yield sample  # type: ignore[misc]


def _count_lines(path: str, max_bytes: int) -> int:
    return sum(1 for _ in read_lines_with_gaps(path, lambda _: None, None, max_bytes))


def _folder_samples(
    source: TextSource, fields: Sequence[str], counter: ReadCounter | None, report: ReadingReport
) -> Iterator[tuple[str, ...]]:
    source.check_folder(fields)
    if source.columns or source.header is not None:
        raise ValueError(f"{source.files[0]} is a folder of classes; columns and header belong to tables")
    return read_class_folders(Path(source.files[0]), report.add_error, counter, source.max_line_bytes)


def _table_samples(
    source: TextSource, fields: Sequence[str], counter: ReadCounter | None, report: ReadingReport
) -> Iterator[tuple[str, ...]]:
    path, columns, limit = source.files[0], source.columns, source.max_line_bytes
    if columns and len(columns) != len(fields):
        needed = f"{len(fields)} columns are needed ({', '.join(fields)})"
        raise ValueError(f"{path}: {needed}, got {len(columns)}")
    wanted = columns or tuple(range(1, len(fields) + 1))
    rows: Iterator[Row]
    if source.is_hub:
        data_set = load_hub(path, source.subset, source.split)
        rows = ((f"{path}, sample {number}", row) for number, row in enumerate(data_set, 1))
    elif source.kind == "jsonl":
        rows = json_rows(path, limit, counter, report)
    elif source.kind == "parquet":
        rows = parquet_rows(path)
    else:
        read = csv_rows if source.kind == "csv" else tsv_rows
        rows = delimited_rows(path, read(path, limit, counter, report), wanted, source.header, report)
    for place, row in rows:
        try:
            sample = tuple(cell_text(place, row, column) for column in wanted)
        except ValueError as error:
            report.add_error(error)
        else:
            yield sample
