"""Labelled texts as files: a folder for each class, whose name is the label, with a file for each text.

    reviews/train/pos/0.txt, reviews/train/pos/1.txt, ..., reviews/train/neg/0.txt, ...

Classes and files are read in the order of their names. Names that begin with a dot are left out.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from subquad.data.text.files import MAX_LINE_BYTES, OnError, ReadCounter, file_record, read_lines, too_long
from subquad.files import digest


def class_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the label and the path of every text."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    classes = [path for path in _visible(folder) if path.is_dir()]
    if not classes:
        raise ValueError(f"{folder} has no folders: a folder of labelled texts has a folder for each class")
    for label in classes:
        files = [path for path in _visible(label) if path.is_file()]
        if not files:
            raise ValueError(f"{label} has no files: the folder of a class has a file for each text")
        yield from ((label.name, path) for path in files)


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def read_class_folders(
    folder: Path, on_error: OnError, counter: ReadCounter | None = None, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[str, str]]:
    """Yields (label, text). A text is the content of its file without the end of its last line."""
    for label, path in class_files(folder):
        try:
            text = read_whole_text(path, counter, max_bytes)
        except ValueError as error:
            on_error(error)
        else:
            yield label, text


def read_whole_text(path: Path, counter: ReadCounter | None = None, max_bytes: int = MAX_LINE_BYTES) -> str:
    """Returns the content of a text file; more than `max_bytes` are an error, as they are in a line."""
    lines, size = [], 0
    for number, line in enumerate(read_lines(path, counter, max_bytes), 1):
        size += len(line.encode()) + 1
        if size > max_bytes + 1:
            raise ValueError(too_long(path, number, max_bytes))
        lines.append(line)
    return "\n".join(lines)


def folder_record(folder: Path, known: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Returns a record of the content of all files, as `file_record` does of one.

    `listing` is a checksum of their names, sizes and modification times. The files are read only if no record in
    `known` has the same path and listing.
    """
    files = [(path.relative_to(folder).as_posix(), path, path.stat()) for _, path in class_files(folder)]
    quick = {
        "path": str(folder),
        "size": sum(status.st_size for _, _, status in files),
        "listing": digest([(name, status.st_size, status.st_mtime_ns) for name, _, status in files]),
    }
    for record in known:
        if all(record.get(key) == value for key, value in quick.items()) and "sha256" in record:
            return {**quick, "sha256": record["sha256"]}
    return {**quick, "sha256": digest([(name, file_record(path)["sha256"]) for name, path, _ in files])}
