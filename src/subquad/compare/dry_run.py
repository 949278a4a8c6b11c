"""What a comparison would train and how long it would take, without training anything.

Data is read only where a training is as long as so many passes over it.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from subquad.compare.comparison import SEEDS, choose_seeds, choose_variants
from subquad.compare.matching import Match, count_parameters, match_parameters
from subquad.compare.measure.lengths import ModelPasses, Shape
from subquad.compare.measure.timing import Work, interleaved_seconds
from subquad.compare.tuning.search import HALVED
from subquad.compare.variants import Variant, add_finished_runs, add_floor, variant_recipe
from subquad.data.batches import BatchPlan
from subquad.models import MODELS, build_from_config
from subquad.train.recipe import Recipe
from subquad.train.run import build_task


@dataclass(frozen=True)
class PlannedMechanism:
    """A mechanism, the parameters of its model, and the seeds of its trials. runs: finished ones, by their seeds."""

    variant: Variant
    parameters: int
    seeds: tuple[int, ...]
    runs: dict[int, str]


def plan_mechanisms(
    recipe: Recipe,
    mixers: Sequence[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    runs: Sequence[str] = (),
    baseline: str = "softmax",
    seeds: int | Sequence[int] = SEEDS,
    match: Match = "parameters",
    floors: bool = True,
) -> list[PlannedMechanism]:
    """The mechanisms of a comparison; the arguments are those of `Comparison.create`.

    Vocabularies and classes are those that the recipe names. The data may have others, and the widths that match
    numbers of parameters then change with them.
    """
    data_dependent = recipe.task_class.expected_model_config(recipe.data)
    variants = choose_variants(recipe, mixers, options, runs, baseline)
    variants = add_floor(recipe, variants) if floors and variants else variants
    if variants and match == "parameters":
        variants = match_parameters(recipe, variants, data_dependent)
    variants, finished = add_finished_runs(recipe, variants, runs)
    planned = []
    for variant in variants:
        own = {run.seed: run.folder for run in finished if run.label == variant.label}
        trained = choose_seeds(recipe, seeds) if variant.trained else ()
        parameters = count_parameters(recipe, variant, data_dependent)
        planned.append(PlannedMechanism(variant, parameters, tuple(dict.fromkeys([*trained, *own])), own))
    return planned


# ---------------------------------------------------------------------- time

TIMED, LONG_PASS = 2, 10.0
"""Updates that are timed; the seconds from which on the first one, which may compile kernels, is enough."""
ASSUMED = {"vocab": 4000, "source_vocab": 4000, "target_vocab": 4000, "num_classes": 10}
"""Sizes where only the data tells them."""


@dataclass(frozen=True)
class TimeEstimate:
    """The trainings of a mechanism: those of its search, those that are compared, and the minutes of one of these.

    minutes_each: None if it is not known how many updates there are: epochs of data that is not there.
    """

    tuning: int
    trials: int
    minutes_each: float | None

    @property
    def minutes(self) -> float:
        return (self.trials + HALVED * self.tuning) * (self.minutes_each or 0.0)

    @property
    def shown(self) -> str:
        return "unknown" if self.minutes_each is None else f"{self.minutes_each:,.1f}"


def estimate_times(recipe: Recipe, planned: Sequence[PlannedMechanism], tune: int) -> list[TimeEstimate]:
    """For each mechanism, from a few updates with a random batch. A trial of a search takes a share of a training."""
    own = [
        Recipe.parse(one.variant.label, variant_recipe(recipe.model_dump(mode="json"), one.variant)) for one in planned
    ]
    counted = any(one.train.updates is None and one.train.minutes is None for one in own)
    sizes = _sample_sizes(recipe) if counted else None
    return [_estimate_time(one, mechanism, tune, sizes) for one, mechanism in zip(own, planned, strict=True)]


def _estimate_time(
    recipe: Recipe, planned: PlannedMechanism, tune: int, sizes: Sequence[np.ndarray] | None
) -> TimeEstimate:
    trained, train = planned.variant.trained, recipe.train
    trials = sum(seed not in planned.runs for seed in planned.seeds) if trained else 0
    tuning = tune if trained else 0
    if train.minutes is not None:
        return TimeEstimate(tuning, trials, train.minutes)
    updates = train.updates or (None if sizes is None else _updates_of_epochs(recipe, sizes))
    if updates is None:
        return TimeEstimate(tuning, trials, None)
    known = recipe.model_data(recipe.task_class.expected_model_config(recipe.data))
    fields = MODELS[known["kind"]].Config.model_fields
    model = build_from_config({**{name: size for name, size in ASSUMED.items() if name in fields}, **known})
    batch, length = recipe.task_class.typical_batch(recipe.data, recipe.task_class.budget(train.budget))
    shape = Shape(batch, length or model.native_length or 1)
    passes = ModelPasses(model.train(), recipe.task_class, "full", shape)
    return TimeEstimate(tuning, trials, _seconds(passes.training) * updates * train.accumulate / 60)


def _sample_sizes(recipe: Recipe) -> Sequence[np.ndarray] | None:
    """The sizes of the training samples, of data that is prepared for this alone; None: it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return build_task(recipe, Path(folder)).samples("train", training=True).sizes
        except ValueError:
            return None


def _updates_of_epochs(recipe: Recipe, sizes: Sequence[np.ndarray]) -> int:
    train = recipe.train
    batches = BatchPlan(*sizes, budget=recipe.task_class.budget(train.budget), seed=train.seed).epoch(0)
    return (train.epochs or 1) * -(-len(batches) // train.accumulate)


def _seconds(work: Work) -> float:
    """The first pass of a short piece of work does not count: it sets things up."""
    (first,) = interleaved_seconds({"": work}, [1], warmup=0)[""]
    return first if first > LONG_PASS else min(interleaved_seconds({"": work}, [TIMED], warmup=0)[""])
