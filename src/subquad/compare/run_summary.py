"""What the files of a run tell: its learning curve, its costs, the order of its data, its scores."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from subquad.compare.records import CurvePoint, EpochCost, PositionLoss, Score, Trial
from subquad.compare.variants import mixer_options
from subquad.data.batches import BatchPlan, batch_seed
from subquad.files import CHECKSUM, read_metadata
from subquad.models import build_from_config
from subquad.tasks.base import INPUTS, INPUTS_FORMAT, MainMetric, Task
from subquad.train.checkpoint import checkpoint_folder, checkpoints, read_state
from subquad.train.metrics_log import RESUMED, read_metrics
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import ENVIRONMENT, build_task
from subquad.train.run_folder import RECIPE

EPOCHS, BATCHES = 3, 4
"""How many epochs of sample numbers, and how many batches of content, the checksum of the data's order covers."""


class DataOrder(NamedTuple):
    """The order in which a run sees its data: the checksum of its batches, and the updates and targets of an epoch."""

    checksum: str
    updates: int
    targets: int


def describe_run(trial: Trial, run: Path) -> None:
    """Fills in what the run's files tell, as far as there are any: a failed run has got somewhere, too."""
    if not (run / RECIPE).exists() or not (run / INPUTS).exists():
        return
    recipe = read_recipe(run / RECIPE)
    model_config = read_metadata(run / INPUTS, INPUTS_FORMAT, "inputs of a model", ["model", CHECKSUM])["model"]
    with torch.device("meta"):
        model = build_from_config(recipe.model_data(model_config))
    trial.parameters, trial.config = model.parameter_count(), mixer_options(model)
    trial.setting = _setting(run, recipe)
    if found := checkpoints(checkpoint_folder(run)):
        trial.training_seconds = 60 * read_state(found[0]).extra["minutes"]
    if (run / "metrics.jsonl").exists():
        trial.curve = learning_curve(
            read_metrics(run / "metrics.jsonl"), recipe.task_class.main_metric, trial.training_seconds
        )
        records = read_metrics(run / "metrics.jsonl", "train")
        speeds = [record["targets_per_second"] for record in records if "targets_per_second" in record]
        trial.tokens_per_second = float(np.median(speeds)) if speeds else None


def _setting(run: Path, recipe: Recipe) -> dict[str, Any]:
    machine = json.loads((run / ENVIRONMENT).read_text()) if (run / ENVIRONMENT).exists() else {}
    setting = {name: machine[name] for name in ("cpu", "threads", "torch") if name in machine}
    budget = recipe.task_class.budget(recipe.train.budget)
    limits = {"max_tokens": budget.max_tokens, "max_sentences": budget.max_sentences}
    batch = ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)
    return {**setting, "precision": recipe.train.precision, "batch": batch, "accumulate": recipe.train.accumulate}


# ---------------------------------------------------------------------- learning curve


def learning_curve(records: Sequence[Mapping[str, Any]], metric: MainMetric, total: float | None) -> list[CurvePoint]:
    """The validations of a run, from the records of its log.

    total: seconds of training until the last validation, from which those of the others follow.

    The time between an interruption and going on is not counted.
    """
    passed, points = 0.0, []
    for before, record in zip([None, *records], records, strict=False):
        if before is not None and record["event"] != RESUMED:
            passed += max(0.0, record["time"] - before["time"])
        if record["event"] == "valid":
            points.append((passed, record))
    start = 0.0 if total is None or not points else total - points[-1][0]
    return [
        CurvePoint(
            update=record["update"],
            seconds=None if total is None else max(0.0, start + seconds),
            loss=_number(record.get("loss")),
            value=None if (value := _number(record.get(metric.key))) is None else metric.scale * value,
        )
        for seconds, record in points
    ]


def _number(value: Any) -> float | None:
    """The value, unless it is a string: that is how a log writes numbers that are not finite."""
    return value if isinstance(value, int | float) else None


# ---------------------------------------------------------------------- scores


def read_scores(evaluation: Path, task: type[Task]) -> dict[str, Score]:
    """The metrics of an evaluation; the one that quality is judged by has its title."""
    content = json.loads(evaluation.read_text())
    metric, scores = task.main_metric, {}
    for name, found in content["metrics"].items():
        scale = 100 if found["percent"] else 1
        scores[metric.title if name == metric.key else name] = Score(
            value=scale * found["value"],
            low=scale * found["low"],
            high=scale * found["high"],
            samples=content["counts"].get("documents", content["samples"]),  # what intervals come from
            signature=found["signature"],
        )
    return scores


def read_position_losses(evaluation: Path) -> list[PositionLoss]:
    """The losses of an evaluation by position in the context; none for tasks that have no such losses."""
    content = json.loads(evaluation.read_text())
    return [PositionLoss.model_validate(found) for found in content.get("loss_by_position", [])]


# ---------------------------------------------------------------------- order of the data, cost of an epoch


def data_order(run: Path) -> DataOrder | None:
    """The order of the run's own recipe and data; None if the data is gone."""
    recipe = read_recipe(run / RECIPE)
    if not recipe.data.is_available(run / "data"):
        return None
    task, config = build_task(recipe, run / "data"), recipe.train
    samples = task.samples("train", training=True)
    plan = BatchPlan(*samples.sizes, budget=task.budget(config.budget), seed=config.seed)
    total = hashlib.sha256()
    epochs = [plan.epoch(number) for number in range(EPOCHS)]
    for batches in epochs:
        for batch in batches:
            total.update(np.ascontiguousarray(batch).tobytes())
            total.update(b"|")
    for place, batch in enumerate(epochs[0][:BATCHES]):
        for value in samples.batch(batch, batch_seed(config.seed, 0, place)).values():
            total.update(value.contiguous().numpy().tobytes())
    targets = sum(int(samples.sizes[-1][batch].sum()) for batch in epochs[0])
    return DataOrder(total.hexdigest(), -(-len(epochs[0]) // config.accumulate), targets)


def epoch_cost(trial: Trial, run: Path, order: DataOrder) -> EpochCost | None:
    """An epoch at the run's median speed; where its log is too short to tell, at its mean time for an update."""
    found = checkpoints(checkpoint_folder(run))
    if not found or not trial.training_seconds:
        return None
    if trial.tokens_per_second is not None:
        seconds, how = order.targets / trial.tokens_per_second, "median speed, without validations"
    else:
        updates = read_state(found[0]).update
        seconds = trial.training_seconds / updates * order.updates
        how = f"mean of {updates:,} updates, validations included"
    setting = {**trial.setting, "epoch": how}
    return EpochCost(
        mechanism=trial.mechanism, seconds=seconds, peak_bytes=trial.peak_bytes, updates=order.updates, setting=setting
    )
