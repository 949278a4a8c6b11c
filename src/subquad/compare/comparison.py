"""The comparison itself: trials first, then what is measured on the machine. Files keep what is done.

Several processes may work in one folder: each piece of work has a lock, and what another process holds is waited for,
or taken over if that process is gone.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from subquad.compare.locks import try_lock
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
from subquad.compare.plan import Plan, TrialName
from subquad.compare.report.schema import Part
from subquad.compare.subprocesses import Log, Worker
from subquad.compare.trials import run_trial, stored_trial
from subquad.config import nearest
from subquad.tasks.base import Task
from subquad.train.recipe import Recipe

WAIT = 3.0
"""Seconds between looks at what other processes do."""


class Progress(Protocol):
    """Called with a message after each step; `note` says something in between."""

    def __call__(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...


class Shard(NamedTuple):
    """The `number`-th of `of` shards of the trials, counted from 1. The first shard also measures the lengths."""

    number: int = 1
    of: int = 1

    def trials(self, trials: Sequence[TrialName]) -> list[TrialName]:
        return list(trials[self.number - 1 :: self.of])


ALL = Shard()


def open_task(recipe: Recipe, out: Path) -> Task:
    """The recipe's data, which is prepared once for all trials."""
    with _wait_for_lock(out, "data", lambda message: print(message, file=sys.stderr)):
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
        """seconds: of a training pass, beyond which longer lengths are left out; retry: failed trials once more."""
        self.out, self.plan, self.baseline, self.seconds, self.retry = out, plan, baseline, seconds, retry

    def open_trials(self, shard: Shard = ALL) -> list[TrialName]:
        """What is not computed yet."""
        return [name for name in shard.trials(self.plan.trials()) if not self._ended(name)]

    def open_lengths(self, shard: Shard = ALL) -> list[tuple[Part, int]]:
        steps = length_steps(self.plan) if shard.number == 1 else []
        return [step for step in steps if stored_lengths(self.out, self.plan, *step) is None]

    def steps(self, shard: Shard = ALL) -> int:
        """How often `run` reports progress, at most."""
        return len(self.open_trials(shard)) + len(self.open_lengths(shard)) + (2 if shard == ALL else 0)

    def run(self, progress: Progress, shard: Shard = ALL) -> None:
        """Everything that is open, or one shard of it."""
        self._run_trials(progress, shard)
        with (
            _wait_for_lock(self.out, "measurements", progress.note),  # on one machine, one after the other
            closing(worker_of(self.out)) as worker,
        ):
            self._measure(worker, progress, shard)

    def _measure(self, worker: Worker, progress: Progress, shard: Shard) -> None:
        for part, length in self.open_lengths(shard):
            what = f"{'whole model' if part == 'full' else 'encoder'} at {length:,} tokens"
            log = _with_prefix(progress, what)
            points = run_length(worker, self.out, self.plan, (part, length), self.seconds, log)
            done = [point.mechanism for point in points if point.status == "done"]
            progress(f"{what}: {len(done)} of {len(points)} mechanisms measured")
        if shard != ALL:
            return
        what = "decoding speed"
        if not decoding_is_current(self.out, self.plan):
            run_decoding(worker, self.out, self.plan, _with_prefix(progress, what))
        progress(what)
        what = "distance from exact attention"
        if not approximation_is_current(self.out, self.plan, self.baseline):
            run_approximation(worker, self.out, self.plan, self.baseline, _with_prefix(progress, what))
        progress(what)

    def _run_trials(self, progress: Progress, shard: Shard) -> None:
        waiting, tried = self.open_trials(shard), set[TrialName]()
        while waiting:
            for name in waiting:
                with try_lock(_lock_path(self.out, f"{name.label}-{name.seed}")) as own:
                    if own and not self._ended(name):
                        tried.add(name)
                        trial = run_trial(self.out, self.plan, name, _with_prefix(progress, str(name)))
                        progress(f"{name}: {trial.status}{f' ({trial.reason})' if trial.reason else ''}")
            waiting = [name for name in waiting if name not in tried and not self._ended(name)]
            if waiting:
                progress.note(f"another process works on {'; '.join(map(str, waiting))}: waiting")
                time.sleep(WAIT)

    def _ended(self, name: TrialName) -> bool:
        stored = stored_trial(self.out, self.plan, name)
        return stored is not None and (stored.trial.status == "done" or not self.retry)


def _lock_path(out: Path, what: str) -> Path:
    return out / "locks" / "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in what)


@contextmanager
def _wait_for_lock(out: Path, what: str, log: Log) -> Iterator[None]:
    """Waits until nobody else does this."""
    while True:
        with try_lock(_lock_path(out, what)) as own:
            if own:
                yield
                return
        log(f"another process works on the {what}: waiting")
        time.sleep(WAIT)


def _with_prefix(progress: Progress, what: str) -> Log:
    """Passes on what a child says, with what it is about."""
    return lambda line: progress.note(f"{what}: {line}")
