"""What all engines have in common that run pieces in other processes, on this machine or elsewhere.

A piece becomes a job. The leader, which is the process of the comparison, submits all jobs, and watches them through
the shared folder: a lock says that a piece has begun, and its log how it goes on. A job whose worker was lost is
submitted again; a training then goes on from its last checkpoint.
"""

import os
import time
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import Field

from subquad.compare.executors.base import Executor, Piece, execute_if_free
from subquad.compare.locks import POLL_INTERVAL, lock_path
from subquad.compare.subprocesses import Log
from subquad.packages import PLUGINS
from subquad.processes import error_line

Handle = TypeVar("Handle")
"""How an engine refers to a job that was submitted."""
TAIL_BYTES = 2000


class Outcome(NamedTuple):
    """How a job ended; at most one is set. error: why the comparison cannot go on; lost: why to submit it again."""

    error: str | None = None
    lost: str | None = None


@dataclass(frozen=True)
class Job:
    """A piece with everything that a process elsewhere needs to do it: what is called there.

    cwd: the leader's folder, to which paths of recipes are relative. plugins: the modules that it was given.
    """

    piece: Piece
    out: Path
    cwd: Path
    cpus: int
    plugins: str

    def __call__(self) -> Outcome:
        try:
            os.chdir(self.cwd)
            os.environ |= {"OMP_NUM_THREADS": str(self.cpus), PLUGINS: self.plugins}
            while self.piece.is_open(self.out):
                if execute_if_free(self.piece, self.out, lambda _: None):
                    break
                time.sleep(POLL_INTERVAL)
        except KeyboardInterrupt:  # it was cancelled, or somebody has ended its training
            return Outcome(lost="it was interrupted")
        except Exception as error:
            return Outcome(error=error_line(error))
        return Outcome()


class Cluster(Executor, Generic[Handle]):
    """Does all pieces at once, as far as the engine has room. Subclasses say how jobs are submitted."""

    class Options(Executor.Options):
        """What all engines have."""

        cpus: int = Field(1, ge=1, description="The CPUs of a training, which are also its threads.")
        gpus: int = Field(0, ge=0, description="The GPUs of a training; with 0 it runs on the CPU.")
        retries: int = Field(3, ge=0, description="How often a training goes on elsewhere after its worker was lost.")

    @abstractmethod
    def start(self, out: Path) -> None:
        """Connects with the engine, or starts it. out: the folder of the comparison."""

    @abstractmethod
    def submit(self, job: Job) -> Handle: ...

    @abstractmethod
    def wait(self, handles: Sequence[Handle], seconds: float) -> Sequence[Handle]:
        """Those of the jobs that have ended; waits for the first, but no longer than so many seconds."""

    @abstractmethod
    def outcome(self, handle: Handle) -> Outcome:
        """How a job that has ended did."""

    @abstractmethod
    def cancel(self, handles: Sequence[Handle]) -> None:
        """Ends jobs; what runs has time to save."""

    @abstractmethod
    def stop(self) -> None:
        """Undoes `start`."""

    def run(self, out: Path, pieces: Sequence[Piece], on_done: Callable[[Piece], None], log: Log) -> None:
        waiting = [piece for piece in pieces if piece.is_open(out)]
        if not waiting:
            return
        self.start(out)
        try:
            _Leader(self, out.resolve(), on_done, log).do(waiting)
        finally:
            self.stop()


class _Leader(Generic[Handle]):
    """Follows the jobs of one call of `Cluster.run`."""

    def __init__(self, engine: Cluster[Handle], out: Path, on_done: Callable[[Piece], None], log: Log) -> None:
        self.engine, self.out, self.on_done, self.log = engine, out, on_done, log
        self.running: dict[Handle, Piece] = {}
        self.losses: Counter[str] = Counter()
        self.errors: list[str] = []
        self.heard: dict[str, str] = {}

    def do(self, pieces: Iterable[Piece]) -> None:
        """An error of one piece lets the others end."""
        try:
            for piece in pieces:
                self._submit(piece)
            self.log(f"{len(self.running)} jobs for {self.engine.name}: waiting for the first to begin")
            while self.running:
                for handle in self.engine.wait(list(self.running), POLL_INTERVAL):
                    self._settle(self.running.pop(handle), self.engine.outcome(handle))
                self._listen()
        except BaseException:
            self.engine.cancel(list(self.running))
            raise
        if self.errors:
            raise ValueError("; ".join(self.errors))

    def _submit(self, piece: Piece) -> None:
        job = Job(piece, self.out, Path.cwd(), self.engine.options.cpus, os.environ.get(PLUGINS, ""))
        self.running[self.engine.submit(job)] = piece

    def _settle(self, piece: Piece, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.errors.append(f"{piece.name}: {outcome.error}")
        elif outcome.lost is None:
            self.on_done(piece)
        elif self.losses[piece.name] < self.engine.options.retries:
            self.losses[piece.name] += 1
            warnings.warn(f"{piece.name}: its worker was lost ({outcome.lost}); another goes on", stacklevel=2)
            self._submit(piece)
        else:
            kept = "the same command goes on from what is kept"
            self.errors.append(
                f"{piece.name}: {self.losses[piece.name] + 1} workers were lost ({outcome.lost}); {kept}"
            )

    def _listen(self) -> None:
        """Passes on what is new: that a piece has begun, and the last lines of the logs."""
        for piece in self.running.values():
            begun = lock_path(self.out, piece.name).exists()
            line = (_last_line(piece.log_file(self.out)) or "begun") if begun else "waiting for a worker"
            if self.heard.get(piece.name, "waiting for a worker") != line:
                self.heard[piece.name] = line
                self.log(f"{piece.name}: {line}")


def _last_line(path: Path) -> str:
    """The last line of a file that is not empty, if there is one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")
