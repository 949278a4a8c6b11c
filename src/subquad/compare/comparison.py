"""A comparison in a folder: its plan, then its trials, then what is measured on the machine, then the result.

Files keep what is done, so that a comparison can be interrupted at any time, and go on. Several processes may work in
one folder: each piece of work has a lock, and what another process holds is waited for, or taken over if that process
is gone.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from subquad.compare import measure
from subquad.compare.executors.base import Executor, Local, Piece
from subquad.compare.floors import compute_floors, floors_are_open, stored_floors
from subquad.compare.locks import wait_for_lock
from subquad.compare.matching import Match, match_parameters
from subquad.compare.measure.base import Context, Margin, Measurement, Step
from subquad.compare.measure.cache import open_steps, run_step, start_worker
from subquad.compare.plan import Plan, TrialName, open_plan, read_plan
from subquad.compare.report.assemble import assemble
from subquad.compare.report.result import Result
from subquad.compare.statistics.times import LOOKS
from subquad.compare.trials import TrialPiece, Trials
from subquad.compare.tuning.search import check_tunable
from subquad.compare.tuning.trials import open_pieces, tune
from subquad.compare.variants import Variant, add_finished_runs, add_floor, build_variants
from subquad.models import build_from_config
from subquad.tasks import Task
from subquad.tasks.base import check_split
from subquad.train.recipe import Recipe
from subquad.train.run import build_task

SEEDS = 3
"""Fewer say nothing about mechanisms: a difference may be that of two initialisations."""
LENGTHS = (256, 1024, 4096)
TOKENS = 16384
MAX_SECONDS = 20.0
LENGTH_PERCENTILES = (50, 95)
"""Of the lengths of the task's samples: at these costs are measured first."""
OnProgress = Callable[[int, int, str], None]
"""Receives how many steps are done, of how many, and a message; between two steps the number stays the same."""


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `count` parts of a comparison's work, counted from 1.

    The trials are dealt out. The first shard also makes the measurements that need no trained models.
    """

    number: int = 1
    count: int = 1

    def trials(self, trials: Sequence[TrialName]) -> list[TrialName]:
        return list(trials[self.number - 1 :: self.count])

    def makes(self, measurement: Measurement) -> bool:
        return self == EVERYTHING or (self.number == 1 and not measurement.needs_trials)


EVERYTHING = Shard()


class Comparison:
    """A comparison in the folder `out`."""

    def __init__(
        self,
        out: Path,
        plan: Plan,
        baseline: str,
        *,
        margin: str | float | None = None,
        max_seconds: float = MAX_SECONDS,
        retry: bool = False,
    ) -> None:
        """See `create`."""
        if baseline not in plan.labels:
            labels = ", ".join(plan.labels)
            raise ValueError(f"the baseline {baseline!r} is none of the mechanisms that are compared: {labels}")
        self.out, self.baseline, self.retry, self.max_seconds = out, baseline, retry, max_seconds
        self.margin = None if margin is None else Margin.parse(margin)
        self._use(plan)

    def _use(self, plan: Plan) -> None:
        self.plan, self.trials = plan, Trials(self.out, plan)
        self.context = Context(self.out, plan, self.trials, self.baseline, self.max_seconds, self.margin)

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        out: Path,
        mixers: Sequence[str] = (),
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        runs: Sequence[str] = (),
        baseline: str = "softmax",
        seeds: int | Sequence[int] = SEEDS,
        match: Match = "parameters",
        split: str | None = None,
        lengths: Sequence[int] = LENGTHS,
        tokens: int = TOKENS,
        rounds: Sequence[int] = LOOKS,
        margin: str | float | None = None,
        max_seconds: float = MAX_SECONDS,
        retry: bool = False,
        floors: bool = True,
        tune: int = 0,
    ) -> Self:
        """A new comparison, or an existing one that is continued or extended.

        Everything is checked before anything is computed; the data is prepared.

        mixers          names of mechanisms, `label=name`, or a pattern of layers as `label=softmax*5,primal`; the name
                        `recipe` stands for the recipe's own model
        options         what is set for one mechanism, by label: its options, and changes to sections of its recipe, as
                        in {"eva": {"window": 64, "schedule": {"lr": 1e-3}}}
        runs            finished runs to use instead of training, as `folder` or `label=folder`
        baseline        the label of the mechanism that the others are compared with; it is added if it is not named
        seeds           how many, from the recipe's on, or which
        match           `parameters`: feed-forward networks are as wide as it takes to have as many parameters as the
                        baseline; `none`: they are as wide as in the recipe
        split           the data that quality is measured on; by default it is `test`, or `valid` if there is no `test`
        lengths         at which costs are measured, besides the task's own, each with a batch of `tokens` tokens; none:
                        no costs are measured
        rounds          after how many rounds times are looked at; measuring ends at the first look that decides
        margin          a difference that makes no practical difference, such as 0.5 or "2%"; by default the task's
        max_seconds     a mechanism whose training pass took longer than this is not tried at longer lengths
        retry           try trials that failed once more
        floors          what to compare all mechanisms with: simple models of the data, and a trained model without
                        mixing
        tune            how many trials each mechanism gets to find its settings with, on the validation data
        """
        if tune:
            check_tunable(recipe.train)
        variants = choose_variants(recipe, mixers, options, runs, baseline)
        variants = add_floor(recipe, variants) if floors and variants else variants
        task = _prepare_data(recipe, out)
        data_dependent = task.data_dependent_model_config()
        if variants and match == "parameters":
            variants = match_parameters(recipe, variants, data_dependent)
        variants, finished_runs = add_finished_runs(recipe, variants, runs)
        plan = Plan(
            recipe=recipe.model_dump(mode="json"),
            data_dependent_model_config=data_dependent,
            variants=tuple(variants),
            match=match,
            seeds=choose_seeds(recipe, seeds),
            split=_choose_split(task, split),
            lengths=tuple(sorted(set(lengths))),
            tokens=tokens,
            looks=tuple(rounds),
            task_lengths=_task_lengths(task, recipe),
            runs=tuple(finished_runs),
            floors=floors,
            tune=tune,
        )
        return cls(out, open_plan(plan, out), baseline, margin=margin, max_seconds=max_seconds, retry=retry)

    @classmethod
    def open(cls, out: Path, baseline: str = "softmax", margin: str | float | None = None) -> Self:
        """An existing comparison as it is."""
        return cls(out, read_plan(out), baseline, margin=margin)

    # ------------------------------------------------------------------ computing

    def open_trials(self, shard: Shard = EVERYTHING) -> list[TrialName]:
        """The trials that are not computed yet."""
        return self.trials.open(shard.trials(self.plan.trials()), self.retry)

    def open_steps(self, shard: Shard = EVERYTHING) -> list[tuple[Measurement, Step]]:
        """The steps of measurements that are not measured yet."""
        made = [measurement for measurement in measure.MEASUREMENTS if shard.makes(measurement)]
        return [(one, step) for one in made for step in open_steps(one, self.context)]

    def step_count(self, shard: Shard = EVERYTHING) -> int:
        """How many steps `run` reports: open trials, and what there will be to measure after them."""
        trials = self.open_trials(shard)
        made = [measurement for measurement in measure.MEASUREMENTS if shard.makes(measurement)]
        floors = int(shard.number == 1 and floors_are_open(self.out, self.plan))
        return (
            floors
            + len(open_pieces(self.plan, self.out))
            + len(trials)
            + sum(
                len(one.steps(self.plan) if trials and one.needs_trials else open_steps(one, self.context))
                for one in made
            )
        )

    def run(
        self,
        on_progress: OnProgress = lambda *_: None,
        shard: Shard = EVERYTHING,
        executor: Executor | None = None,
    ) -> None:
        """Computes everything that is not computed yet, or one shard of it.

        executor: what trials run on; by default it is this process. Measurements are always made here.
        """
        progress = _Progress(on_progress, self.step_count(shard))

        def finished(piece: Piece) -> None:
            stored = self.trials.stored(names[piece])
            assert stored is not None, f"{piece.name} left no record"
            trial = stored.trial
            progress.step(f"{piece.name}: {trial.status}{f' ({trial.reason})' if trial.reason else ''}")

        if shard.number == 1:
            self._compute_floors(progress)
        executor = executor or Local()
        if self.plan.untuned:  # by all shards together: no trial can begin before
            self._use(tune(self.out, self.plan, executor, progress.step, progress.note))
        names: dict[Piece, TrialName] = {TrialPiece(name, self.retry): name for name in self.open_trials(shard)}
        executor.run(self.out, list(names), finished, progress.note)
        with (
            wait_for_lock(self.out, "measurements", progress.note),  # on one machine, one after the other
            closing(start_worker(self.out)) as worker,
        ):
            for measurement, step in self.open_steps(shard):
                points = run_step(worker, measurement, self.context, step, progress.prefixed(step.title))
                measured = {point.mechanism for point in points if point.status == "done"}
                count = len({point.mechanism for point in points})
                progress.step(f"{step.title}: {len(measured)} of {count} mechanisms measured")

    def _compute_floors(self, progress: "_Progress") -> None:
        if not floors_are_open(self.out, self.plan):
            return
        with wait_for_lock(self.out, "floors", progress.note):
            if floors_are_open(self.out, self.plan):
                compute_floors(self.out, self.plan)
        found, reason = stored_floors(self.out)
        scores = ", ".join(f"{floor.name} {floor.value:.2f}" for floor in found)
        progress.step(f"floors: {scores or reason or 'this task has none'}")

    def write_report(self, title: str, command: str = "") -> Result:
        """The result of everything that is computed so far, which is written as result.json and report.html.

        command: what the reader could type to make it.
        """
        result = assemble(self.context, title, command)
        result.to_json(self.out / "result.json")
        result.to_html(self.out / "report.html")
        return result


class _Progress:
    """Counts the steps for `OnProgress`."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self.on_progress, self.done, self.total = on_progress, 0, total

    def step(self, message: str) -> None:
        self.done += 1
        self.on_progress(self.done, self.total, message)

    def note(self, message: str) -> None:
        self.on_progress(self.done, self.total, message)

    def prefixed(self, what: str) -> Callable[[str], None]:
        return lambda line: self.note(f"{what}: {line}")


def _prepare_data(recipe: Recipe, out: Path) -> Task:
    """The recipe's task, with its data prepared once for all trials."""
    with wait_for_lock(out, "data", lambda message: print(message, file=sys.stderr)):
        return build_task(recipe, out / "data")


def _task_lengths(task: Task, recipe: Recipe) -> tuple[int, ...]:
    """Median and 95th percentile of the tokens of a training sample; a model of images knows the length of its own."""
    with torch.device("meta"):
        native = build_from_config(recipe.model_data(task.data_dependent_model_config())).native_length
    if native is not None:
        return (native,)
    sizes = np.maximum.reduce(task.samples("train", training=True).sizes)
    found = np.percentile(sizes, LENGTH_PERCENTILES, method="nearest")
    return tuple(dict.fromkeys(max(1, int(length)) for length in found))


def choose_variants(
    recipe: Recipe,
    mixers: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None,
    runs: Sequence[str],
    baseline: str,
) -> list[Variant]:
    """The variants to train; none if only finished runs are compared."""
    if not mixers and not runs:
        raise ValueError("say what to compare: mechanisms, such as lightconv,eva, or finished runs")
    return build_variants(recipe, mixers, options or {}, baseline) if mixers else []


def choose_seeds(recipe: Recipe, seeds: int | Sequence[int]) -> tuple[int, ...]:
    """So many from the recipe's on, or these."""
    first = recipe.train.seed
    return tuple(range(first, first + seeds)) if isinstance(seeds, int) else tuple(dict.fromkeys(seeds))


def _choose_split(task: Task, wanted: str | None) -> str:
    """The split to evaluate on: the one that is wanted, or `test`, or `valid`; one that is not there is refused."""
    known = task.split_names
    split = wanted or ("test" if "test" in known else "valid")
    check_split(split, known)
    return split
