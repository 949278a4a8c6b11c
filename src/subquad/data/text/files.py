"""Text files, plain or compressed with gzip, whatever their names are: their lines, and records of their content.

A line ends with "\\n" or "\\r\\n" and nothing else: what other programs take for line ends (U+2028, form feeds) is a
part of the line. Errors name the file and the line.
"""

import gzip
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from subquad.files import checksum

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 32 << 20
"""The default limit of a line. Lines are held in memory, where tokenizing them takes many times their size, and a gzip
file of 200 KB can hold a line of 200 MB."""


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


OnError = Callable[[ValueError], None]
"""What is done about a line, row or text that cannot be read: it raises the error, or makes a note of it."""


def read_lines(path: str | Path, counter: ReadCounter | None = None, max_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yields the lines of a text file without their ends. Long lines and invalid UTF-8 are errors with their number."""

    def stop(error: ValueError) -> None:
        raise error

    for line in read_lines_with_gaps(path, stop, counter, max_bytes):
        assert line is not None
        yield line


def read_lines_with_gaps(
    path: str | Path, on_error: OnError, counter: ReadCounter | None = None, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[str | None]:
    """Yields the same, and None for a line that cannot be read, after `on_error` got its error."""
    for number, raw in enumerate(_raw_lines(path, counter, max_bytes), 1):
        try:
            line = None if raw is None else raw.decode()
        except UnicodeDecodeError as error:
            on_error(
                ValueError(
                    f"{path}, line {number}: not UTF-8, byte {error.start + 1} is 0x{error.object[error.start]:02x}; "
                    "convert the file, for example with iconv"
                )
            )
            yield None
            continue
        if line is None:
            on_error(ValueError(too_long(path, number, max_bytes)))
            yield None
            continue
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix("\ufeff") if number == 1 else line


def _raw_lines(path: str | Path, counter: ReadCounter | None, max_bytes: int) -> Iterator[bytes | None]:
    """Yields lines with their ends, and None for a line that is too long, whose rest is unpacked only to skip it."""
    with _open_file(path, counter) as file:
        try:
            while line := file.readline(max_bytes + 1):
                if len(line) <= max_bytes:
                    yield line
                    continue
                yield None
                while line and not line.endswith(b"\n"):
                    line = file.readline(max_bytes + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def too_long(path: str | Path, number: int, max_bytes: int) -> str:
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
