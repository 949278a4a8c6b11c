"""What a training costs: the time of an epoch and of the whole run, and the peak of memory, from a few real updates.

Each mechanism has a trainer of its own on the recipe's data. The updates of all are interleaved, so that a machine that
slows down for a while slows all of them down. An epoch and a run are multiples of the median update; validations,
checkpoints and what data costs only once are not in them.
"""

import io
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from subquad.compare.measure.timing import interleaved_seconds, peak_bytes, synchronizer
from subquad.compare.variants import build_variants, variant_recipe
from subquad.progress import TrainingProgress
from subquad.train.recipe import Recipe
from subquad.train.run import build_task
from subquad.train.trainer import Trainer

UPDATES, WARMUP = 20, 2


@dataclass(frozen=True)
class TrainingCost:
    """The costs of one mechanism.

    seconds: the median of the timed updates, between its quartiles low and high. peak_bytes: of one update, besides
    weights and the optimiser's averages. epoch_updates, run_updates: so many an epoch and the whole run have; None if
    the recipe ends otherwise.
    """

    mechanism: str
    parameters: int
    timed_updates: int
    seconds: float
    low: float
    high: float
    peak_bytes: int
    epoch_updates: int
    run_updates: int | None

    @property
    def epoch_seconds(self) -> float:
        return self.seconds * self.epoch_updates

    @property
    def run_seconds(self) -> float | None:
        return None if self.run_updates is None else self.seconds * self.run_updates

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"epoch_seconds": self.epoch_seconds, "run_seconds": self.run_seconds}


def measure_training(
    recipe: Recipe,
    mixers: Sequence[str],
    data: Path,
    *,
    updates: int = UPDATES,
    on_round: Callable[[int], None] = lambda _: None,
) -> list[TrainingCost]:
    """Times so many updates of the recipe with each mechanism; `recipe` stands for the recipe's own model.

    data: the folder in which the recipe's data is prepared. on_round: told how many updates of each are timed.
    """
    variants = build_variants(recipe, mixers, {}, baseline=mixers[0].partition("=")[0])
    task = build_task(recipe, data)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        progress = stack.enter_context(TrainingProgress(stream=io.StringIO()))
        trainers = {}
        for variant in variants:
            own = Recipe.parse(variant.label, variant_recipe(recipe.model_dump(mode="json"), variant))
            folder = scratch / variant.slug
            folder.mkdir()
            trainers[variant.label] = Trainer(own, task, folder, progress)
        steps = {label: stack.enter_context(closing(trainer.updates())) for label, trainer in trainers.items()}
        work = {label: partial(next, step) for label, step in steps.items()}
        device = next(iter(trainers.values())).device
        wait = synchronizer(device)
        seconds = interleaved_seconds(work, [updates], warmup=WARMUP, synchronize=wait, after_round=on_round)
        return [
            _cost(label, trainer, seconds[label], peak_bytes(work[label], device))
            for label, trainer in trainers.items()
        ]


def _cost(label: str, trainer: Trainer, seconds: Sequence[float], peak: int) -> TrainingCost:
    config = trainer.recipe.train
    epoch = math.ceil(len(trainer.plan.epoch(0)) / config.accumulate)
    run = config.updates if config.updates is not None else config.epochs * epoch if config.epochs is not None else None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    median = statistics.median(seconds)
    return TrainingCost(label, trainer.model.parameter_count(), len(seconds), median, low, high, peak, epoch, run)
