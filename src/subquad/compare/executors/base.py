"""What an executor is, and the one that works in this process.

The work of a comparison consists of pieces. A piece says what is to be done by names alone, and finds everything else
in the folder of the comparison, which all machines share. So it can be sent anywhere, and done again wherever its first
worker was lost. A piece is done under its lock (`locks`), whoever does it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from subquad import config
from subquad.compare.locks import POLL_INTERVAL, lock_path, try_lock
from subquad.compare.subprocesses import Log


class Piece(ABC):
    """A piece of work. Subclasses are frozen dataclasses of names and numbers, which can be pickled and compared."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What people read, and what its lock is called: no other piece of the comparison has it."""

    @abstractmethod
    def is_open(self, out: Path) -> bool:
        """Whether it has still to be done. out: the folder of the comparison."""

    @abstractmethod
    def execute(self, out: Path, log: Log) -> None:
        """Does the work, or what is left of it, and leaves the result in files of `out`.

        Work that failed is a result, too. An exception means that the comparison itself cannot go on.
        """

    @abstractmethod
    def log_file(self, out: Path) -> Path:
        """The file whose lines say how the work goes on."""


class Executor(ABC):
    """Does pieces of work."""

    class Options(config.Options):
        """What can be chosen; subclasses extend it."""

    name: ClassVar[str]

    def __init__(self, options: Any = None) -> None:
        """options: of the subclass; None: its defaults."""
        self.options: Any = self.Options() if options is None else options

    @abstractmethod
    def run(self, out: Path, pieces: Sequence[Piece], on_done: Callable[[Piece], None], log: Log) -> None:
        """Does those of the pieces that are open, and returns when all of them are done.

        on_done: called in this process, once for each, as soon as it is done, by whomever. log: receives lines that say
        how work goes on. KeyboardInterrupt ends what runs, and passes on.
        """


class Local(Executor):
    """One piece after the other. What another process works on is waited for."""

    name = "local"

    def run(self, out: Path, pieces: Sequence[Piece], on_done: Callable[[Piece], None], log: Log) -> None:
        waiting = [piece for piece in pieces if piece.is_open(out)]
        while waiting:
            left = []
            for piece in waiting:
                done = execute_if_free(piece, out, lambda line, name=piece.name: log(f"{name}: {line}"))  # type: ignore[misc]
                if done or not piece.is_open(out):
                    on_done(piece)
                else:
                    left.append(piece)
            waiting = left
            if waiting:
                log(f"another process works on {'; '.join(piece.name for piece in waiting)}: waiting")
                time.sleep(POLL_INTERVAL)


def execute_if_free(piece: Piece, out: Path, log: Log) -> bool:
    """Does a piece that is open and that nobody else works on. Returns whether it did."""
    with try_lock(lock_path(out, piece.name)) as acquired:
        if not acquired or not piece.is_open(out):
            return False
        piece.execute(out, log)
        return True
