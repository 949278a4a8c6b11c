"""Lines of standard input, for commands that answer each with a line."""

import itertools
import os
import queue
import stat
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO


class LineReader:
    """Lines in windows: a file's by number, so that batches are always the same; of a pipe, what has arrived."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.replaced = stream, 0

    def windows(self, size: int) -> Iterator[list[str]]:
        """Yields up to `size` lines at a time."""
        if self._is_file():
            while lines := list(itertools.islice(self.stream, size)):
                yield [self._text(line) for line in lines]
            return
        arrived: queue.Queue[bytes | None] = queue.Queue(size)
        threading.Thread(target=self._fill, args=(arrived,), daemon=True).start()
        more = True
        while more:
            taken = [arrived.get()]
            while len(taken) < size and not arrived.empty():
                taken.append(arrived.get())
            more = taken[-1] is not None
            if window := [self._text(line) for line in taken if line is not None]:
                yield window

    def _is_file(self) -> bool:
        try:
            return stat.S_ISREG(os.fstat(self.stream.fileno()).st_mode)
        except OSError:
            return False

    def _fill(self, arrived: "queue.Queue[bytes | None]") -> None:
        for line in self.stream:
            arrived.put(line)
        arrived.put(None)

    def _text(self, line: bytes) -> str:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace")
        self.replaced += "\N{REPLACEMENT CHARACTER}" in text
        return text


def warn_of_lines(count: int, what: str) -> None:
    if count:
        print(f"subquad: warning: {count:,} lines {what}", file=sys.stderr)
