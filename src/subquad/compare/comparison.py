"""The comparison itself: cells first, then what is measured on the machine. Files keep what is done.

Several processes may work in one folder: each piece of work is claimed, and what another process claims is waited for,
or taken over if that process is gone.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from subquad.compare.locks import claimed
from subquad.compare.measure.cache import (
    approximation_is_current,
    decoding_is_current,
    length_steps,
    run_approximation,
    run_decoding,
    run_length,
    stored_lengths,
    worker_of,
)
from subquad.compare.plan import CellName, Plan
from subquad.compare.report.schema import Part
from subquad.compare.subprocesses import Say, Worker
from subquad.compare.trials import run_cell, stored_cell
from subquad.config import nearest
from subquad.tasks.base import Task
from subquad.train.recipe import Recipe

WAIT = 3.0
"""Seconds between looks at what other processes do."""


class Progress(Protocol):
    """Called with a message after each step; `note` says something in between."""

    def __call__(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...


class Share(NamedTuple):
    """The `number`-th of `of` shares of the cells, counted from 1. The first share also measures the lengths."""

    number: int = 1
    of: int = 1

    def cells(self, cells: Sequence[CellName]) -> list[CellName]:
        return list(cells[self.number - 1 :: self.of])


ALL = Share()


def open_task(recipe: Recipe, out: Path) -> Task:
    """The recipe's data, which is prepared once for all cells."""
    with _turn(out, "data", lambda message: print(message, file=sys.stderr)):
        return recipe.build_task(out / "data")


def split_of(task: Task, wanted: str | None) -> str:
    """The split to evaluate on: the one that is wanted, or `test`, or `valid`; one that is not there is refused."""
    known = task.split_names
    split = wanted or ("test" if "test" in known else "valid")
    if split not in known:
        raise ValueError(
            f"the data has no split {split!r}{nearest(split, known)} It has {', '.join(known)}; --split chooses."
        )
    return split


class Comparison:
    """A comparison in a folder."""

    def __init__(self, out: Path, plan: Plan, baseline: str, seconds: float, retry: bool = False) -> None:
        """seconds: of a training pass, beyond which longer lengths are left out; retry: failed cells once more."""
        self.out, self.plan, self.baseline, self.seconds, self.retry = out, plan, baseline, seconds, retry

    def open_cells(self, share: Share = ALL) -> list[CellName]:
        """What is not computed yet."""
        return [name for name in share.cells(self.plan.cells()) if not self._ended(name)]

    def open_lengths(self, share: Share = ALL) -> list[tuple[Part, int]]:
        steps = length_steps(self.plan) if share.number == 1 else []
        return [step for step in steps if stored_lengths(self.out, self.plan, *step) is None]

    def steps(self, share: Share = ALL) -> int:
        """How often `run` reports progress, at most."""
        return len(self.open_cells(share)) + len(self.open_lengths(share)) + (2 if share == ALL else 0)

    def run(self, progress: Progress, share: Share = ALL) -> None:
        """Everything that is open, or one share of it."""
        self._run_cells(progress, share)
        with (
            _turn(self.out, "measurements", progress.note),  # on one machine, one after the other
            closing(worker_of(self.out)) as worker,
        ):
            self._measure(worker, progress, share)

    def _measure(self, worker: Worker, progress: Progress, share: Share) -> None:
        for part, length in self.open_lengths(share):
            what = f"{'whole model' if part == 'full' else 'encoder'} at {length:,} tokens"
            say = _noting(progress, what)
            points = run_length(worker, self.out, self.plan, (part, length), self.seconds, say)
            done = [point.mechanism for point in points if point.status == "done"]
            progress(f"{what}: {len(done)} of {len(points)} mechanisms measured")
        if share != ALL:
            return
        what = "decoding speed"
        if not decoding_is_current(self.out, self.plan):
            run_decoding(worker, self.out, self.plan, _noting(progress, what))
        progress(what)
        what = "distance from exact attention"
        if not approximation_is_current(self.out, self.plan, self.baseline):
            run_approximation(worker, self.out, self.plan, self.baseline, _noting(progress, what))
        progress(what)

    def _run_cells(self, progress: Progress, share: Share) -> None:
        waiting, tried = self.open_cells(share), set[CellName]()
        while waiting:
            for name in waiting:
                with claimed(_claim(self.out, f"{name.label}-{name.seed}")) as own:
                    if own and not self._ended(name):
                        tried.add(name)
                        cell = run_cell(self.out, self.plan, name, _noting(progress, str(name)))
                        progress(f"{name}: {cell.status}{f' ({cell.reason})' if cell.reason else ''}")
            waiting = [name for name in waiting if name not in tried and not self._ended(name)]
            if waiting:
                progress.note(f"another process works on {'; '.join(map(str, waiting))}: waiting")
                time.sleep(WAIT)

    def _ended(self, name: CellName) -> bool:
        stored = stored_cell(self.out, self.plan, name)
        return stored is not None and (stored.cell.status == "done" or not self.retry)


def _claim(out: Path, what: str) -> Path:
    return out / "claims" / "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in what)


@contextmanager
def _turn(out: Path, what: str, say: Say) -> Iterator[None]:
    """Waits until nobody else does this."""
    while True:
        with claimed(_claim(out, what)) as own:
            if own:
                yield
                return
        say(f"another process works on the {what}: waiting")
        time.sleep(WAIT)


def _noting(progress: Progress, what: str) -> Say:
    """Passes on what a child says, with what it is about."""
    return lambda line: progress.note(f"{what}: {line}")
