"""The loop: batches to gradients to updates, with validation, checkpoints and a log; interrupted anywhere, it goes on.

The gradient of an update is the summed loss of its batches over the number of their targets. The order of the data
depends on the seed and the epoch only, and the random choices inside a batch on the seed and its place; a checkpoint
holds weights, optimiser, generators and the place in the epoch, so a resumed run is the uninterrupted one, bit by bit.
"""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from subquad.data.batches import Batch, BatchPlan, Cursor
from subquad.data.prefetch import batch_seed, prefetch
from subquad.files import wrap_corrupt_data_errors
from subquad.models import Model, model_from
from subquad.models.storage import load_weights
from subquad.nn.block import Block
from subquad.nn.stack import Stack
from subquad.tasks.base import Task
from subquad.tasks.evaluation import Samples, evaluation_budget, to_device
from subquad.tasks.losses import LossOutput
from subquad.train.checkpoint import (
    Checkpoint,
    Ranking,
    TrainState,
    best,
    checkpoint_folder,
    checkpoints,
    latest,
    load_checkpoint,
    rotate,
    save_checkpoint,
)
from subquad.train.distributed import ALONE, Workers, placed_like, whole
from subquad.train.log import MetricsLog, Tracker
from subquad.train.optim import optimizer_state, restore_optimizer
from subquad.train.parallel import LossOf, SharedLoss, TensorBatch, evenly
from subquad.train.progress import Status, TrainingProgress, format_metrics
from subquad.train.recipe import Recipe
from subquad.train.rng import rng_state, set_rng_state
from subquad.train.schedules import Schedule
from subquad.train.step import COUNT, Stepped, Updater

SEEDS_APART = 1_000_003
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Share:
    """What a worker does in an update. batches: numbers of samples, with the batch's place in all of training; idle:
    the last of them is another worker's; used: batches of all workers together."""

    batches: list[tuple[Batch, Cursor]]
    idle: bool
    used: int


class Trainer:
    """Trains one model by a recipe in a run directory; call `fit`."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        run: Path,
        progress: TrainingProgress,
        trackers: Sequence[Tracker] = (),
        workers: Workers = ALONE,
    ) -> None:
        """workers: the processes that share every update; each takes its part of the batches."""
        self.recipe, self.task, self.run, self.progress, self.trackers = recipe, task, run, progress, trackers
        if recipe.train.accumulate % workers.world:
            raise ValueError(
                f"train.accumulate is {recipe.train.accumulate}: {workers.world} processes cannot share these batches "
                f"evenly; make it a multiple of {workers.world}"
            )
        self.workers = workers
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = recipe.train
        torch.manual_seed(config.seed)
        self.model: Model = model_from(recipe.model_data(task.data_dependent_model_config())).to(self.device)
        for module in self.model.modules():
            if isinstance(module, Block) and config.compile:
                module.compile()
            if isinstance(module, Stack):
                module.recompute = config.checkpoint_activations
        self.loss = SharedLoss(self.model, self._loss, workers, config.sharded)
        self.updater = Updater(self.loss, recipe.optim, self.device, config.precision == "float16")
        self.phases = self.updater.phases
        self.samples = task.samples("train", training=True)
        self.plan = BatchPlan(*self.samples.sizes, budget=task.budget(config.budget), seed=config.seed)
        self.schedule = Schedule(recipe.schedule, config.updates, config.epochs)
        self.ranking = Ranking(task.metric, task.better)
        self.cursor, self.update, self.worse = Cursor(), 0, 0
        self.targets = 0  # learned from since this process began
        self.best: float | None = None
        self.metrics: dict[str, float] = {}
        self.log = MetricsLog(run / "metrics.jsonl") if workers.leads else None
        self.started = time.monotonic()
        if not workers.leads:  # the same weights, but draws of its own
            torch.manual_seed(config.seed + SEEDS_APART * workers.rank)

    # ------------------------------------------------------------------ the run

    def fit(self) -> dict[str, float]:
        """Trains to the end of the recipe; returns the last validation's metrics."""
        if (path := latest(checkpoint_folder(self.run))) is not None:
            with wrap_corrupt_data_errors(f"the checkpoint {path}"):
                self._resume(path)
            if self._over():
                self.progress.note(
                    f"nothing to train: the run stands at update {self.update:,}, where the recipe ends; limits count "
                    "from the start of the run"
                )
        elif self.log is not None and not self.log.is_new:  # a run that ended before its first checkpoint
            self.log.resumed(0)
        if not self._over() and (note := self._unfinished_warmup()) is not None:
            self.progress.note(note)
        validated, every = self.update, self.recipe.train.validate_every
        with closing(self.updates()) as updates:
            while not self._over():
                ends = next(updates)
                if (every is None and ends) or (every is not None and self.update % every == 0) or self._over():
                    self._validate(ends)
                    validated = self.update
        if validated != self.update or not self.metrics:
            self._validate(self.cursor.batch == 0)
        if self.log is not None:
            self.log.close()
        folder = checkpoint_folder(self.run)
        kept = [*best(folder, self.ranking), *checkpoints(folder)]
        for tracker in self.trackers:
            tracker.artifact(self.run, kept[0])
            tracker.close()
        return self.metrics

    def _unfinished_warmup(self) -> str | None:
        config, schedule = self.recipe.train, self.recipe.schedule
        limits = [] if config.updates is None else [config.updates]
        if config.epochs is not None and schedule.warmup_updates:  # every epoch has as many batches as the first
            limits.append(config.epochs * math.ceil(len(self.plan.epoch(0)) / config.accumulate))
        return schedule.unfinished_warmup(min(limits, default=None), config.epochs)

    def _over(self) -> bool:
        """Whether a limit is reached; the leading worker's clock decides for all."""
        config = self.recipe.train
        if config.minutes is not None and self.workers.world > 1:
            late = self.workers.leads and self._minutes() >= config.minutes
            if self.workers.sum_numbers({"late": float(late)})["late"]:
                return True
        return (
            (config.updates is not None and self.update >= config.updates)
            or (config.epochs is not None and self.cursor.epoch >= config.epochs)
            or (config.minutes is not None and self.workers.world == 1 and self._minutes() >= config.minutes)
            or (config.patience is not None and self.worse >= config.patience)
            or self.schedule.finished(self.update, self.cursor.epoch)
        )

    def updates(self) -> Generator[bool]:
        """Trains for as long as it is asked to: one update for each `next`, which says whether an epoch ended."""
        while True:
            with self.phases("data"):
                shares = self._shares()
            made = prefetch(self._made, shares, self.recipe.train.data_workers)
            with closing(made):
                for share in shares:
                    with self.phases("data"):
                        batches = [to_device(batch, self.device) for batch in next(made)]
                    self._step(batches, share.idle)
                    self.cursor = self.cursor.after(share.used, self.batches_of_epoch)
                    yield self.cursor.batch == 0

    def _shares(self) -> list[Share]:
        """What is left of the epoch, update by update."""
        cursor, size = self.cursor, self.recipe.train.accumulate
        rest = self.plan.rest(cursor)
        self.batches_of_epoch = cursor.batch + len(rest)
        placed = [(numbers, Cursor(cursor.epoch, place)) for place, numbers in enumerate(rest, cursor.batch)]
        groups = [placed[start : start + size] for start in range(0, len(placed), size)]
        return [Share(*evenly(group, self.workers), len(group)) for group in groups]

    def _made(self, share: Share) -> list[dict[str, Tensor]]:
        seed = self.plan.seed
        return [self.samples.batch(numbers, batch_seed(seed, *astuple(place))) for numbers, place in share.batches]

    # ------------------------------------------------------------------ one update

    def _step(self, batches: Sequence[TensorBatch], idle: bool) -> None:
        self.model.train()
        rate = self.schedule.rate(self.update, self.cursor.epoch)
        failures = self.run / "failure" / ("" if self.workers.leads else f"rank{self.workers.rank}")
        done = self.updater.step(batches, rate, failures, self.update, idle)
        self.update += 1
        self.targets += done.count
        with self.phases("report"):
            self._report(done, rate)

    def _loss(self, model: Model, batch: TensorBatch) -> LossOutput:
        dtype = PRECISIONS.get(self.recipe.train.precision)
        with torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext():
            return self.task.loss(model, batch)

    def _report(self, done: Stepped, rate: float) -> None:
        metrics = self.task.metrics(done.sums, done.count)
        extra = {name: value for name, value in metrics.items() if name not in ("loss", "ppl")}
        nll = metrics["loss"] if "ppl" in metrics else None
        epoch = self.cursor.epoch + 1
        self.progress(Status(epoch, self.update, done.loss, nll, done.count, rate, self._share_done(), extra))
        if self.update % self.recipe.train.log_every == 0:
            speed = self.progress.tokens_per_second()
            values = {**metrics, "train_loss": done.loss, "lr": rate, "norm": done.norm, "targets_per_second": speed}
            self._write("train", {name: value for name, value in values.items() if value is not None})

    def _share_done(self) -> float:
        """How much of the run is over: by whatever limit is nearest."""
        config = self.recipe.train
        epochs = self.cursor.epoch + self.cursor.batch / self.batches_of_epoch
        limits = [(self.update, config.updates), (epochs, config.epochs), (self._minutes(), config.minutes)]
        return max((passed / limit for passed, limit in limits if limit is not None), default=0.0)

    def _minutes(self) -> float:
        return (time.monotonic() - self.started) / 60

    def _write(self, event: str, values: Mapping[str, float]) -> None:
        if self.log is None:
            return
        self.log.write(event, self.update, values)
        for tracker in self.trackers:
            tracker.log(event, self.update, values)

    # ------------------------------------------------------------------ validation and checkpoints

    def _validate(self, epoch_end: bool) -> None:
        with self.updater.ema.applied(self.model) if self.updater.ema is not None else nullcontext():
            threads = self.recipe.train.data_workers
            self.metrics = evaluate(self.task, self.model, "valid", self.device, self.workers, self.loss, threads)
        value, sign = self.metrics[self.task.metric], 1 if self.task.better == "lower" else -1
        improved = self.best is None or sign * value < sign * self.best
        self.best, self.worse = (value, 0) if improved else (self.best, self.worse + 1)
        self._write("valid", self.metrics)
        self.progress.note(
            f"update {self.update:,}: valid {format_metrics(self.metrics)}{' (best)' if improved else ''}"
        )
        self._save(epoch_end)
        self.progress.pause()

    def _save(self, epoch_end: bool) -> None:
        extra = {"worse": self.worse, "best": self.best, "minutes": self._minutes()}
        scaler = dict(self.updater.scaler.state_dict())
        cursor, epoch = asdict(self.cursor), self.cursor.epoch
        state = TrainState(self.update, epoch, epoch_end, cursor, scaler, self.metrics, extra)
        content = Checkpoint(
            {name: whole(value) for name, value in self.model.state_dict().items()},
            optimizer_state(self.updater.optimizer, self.model),
            state,
            self.workers.gather(rng_state(), "rank"),
            self.updater.ema.state() if self.updater.ema is not None else None,
        )
        if self.workers.leads:
            save_checkpoint(checkpoint_folder(self.run), content)
            rotate(checkpoint_folder(self.run), self.recipe.checkpoints, self.ranking)
        self.workers.wait()

    def _resume(self, path: Path) -> None:
        saved = load_checkpoint(path)
        own = self.model.state_dict()
        load_weights(self.model, {k: placed_like(v, own[k]) if k in own else v for k, v in saved.model.items()})
        restore_optimizer(self.updater.optimizer, self.model, saved.optimizer)
        if self.updater.ema is not None and saved.ema is not None:
            self.updater.ema.restore(saved.ema)
        if saved.state.scaler:
            self.updater.scaler.load_state_dict(saved.state.scaler)
        state = saved.state
        self.update, self.cursor, self.metrics = state.update, Cursor(**state.cursor), state.metrics
        best_so_far = state.extra["best"]
        self.worse, self.best = int(state.extra["worse"]), None if best_so_far is None else float(best_so_far)
        self.started = time.monotonic() - 60 * state.extra["minutes"]
        if self.log is not None:
            self.log.resumed(self.update)
        self.progress.note(f"resumed at update {self.update:,}, epoch {self.cursor.epoch + 1}")
        mine = "" if self.workers.leads else f"rank{self.workers.rank}."
        # more workers than before: those that are new go on with their seeds
        set_rng_state({name.removeprefix(mine): value for name, value in saved.rng.items() if name.startswith(mine)})


def evaluate(
    task: Task,
    model: Model,
    split: str,
    device: torch.device,
    workers: Workers = ALONE,
    loss_of: LossOf | None = None,
    threads: int = 0,
) -> dict[str, float]:
    """The task's metrics on a split, in eval mode, over every sample once; workers share them.

    loss_of: the loss of a batch, where it is more than task.loss(model, batch). threads: make batches ahead.
    """
    samples: Samples = task.samples(split, training=False)
    loss_of = loss_of or partial(task.loss, model)
    training = model.training
    model.eval()
    sums: dict[str, float] = {}
    plan = BatchPlan(*samples.sizes, budget=task.budget(evaluation_budget(samples)), shuffle=False)
    own, idle = evenly(plan.epoch(0), workers)
    with torch.no_grad(), closing(prefetch(samples.batch, own, threads)) as batches:
        for number, batch in enumerate(batches, 1):
            loss = loss_of(to_device(batch, device))
            if idle and number == len(own):
                break
            found = {name: float(value) for name, value in loss.sums.items()}
            for name, value in {**found, COUNT: loss.count}.items():
                sums[name] = sums.get(name, 0.0) + value
    model.train(training)
    sums = workers.sum_numbers(sums)
    count = int(sums.pop(COUNT))
    return task.metrics(sums, count)
