"""The trainer: batches to losses to gradients to updates, with validation, checkpoints and a log.

    Trainer.fit          until a limit of the recipe is reached
      Trainer.updates    plans updates, loads their batches, and makes one update for each `next`
        Updater.step     passes of all batches, one sum over all processes, clipping, the optimiser (updater.py)
      validate           the task's metrics on a split
      Trainer._save      weights, optimiser, generators, and the place in the epoch

The order of the data depends on the seed and the epoch only, and the random choices inside a batch on the seed and its
place; a checkpoint holds weights, optimiser, generators and the place in the epoch, so a resumed run is the
uninterrupted one, bit by bit.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.data.batches import BatchPlan, Cursor, plan_updates
from subquad.data.loader import BatchLoader
from subquad.files import wrap_corrupt_data_errors
from subquad.models import Model
from subquad.models.base import compile_blocks
from subquad.models.seeded import build_seeded
from subquad.models.storage import load_weights
from subquad.nn.stack import Stack
from subquad.processes import StopRequest, stop_requests
from subquad.progress import TrainingProgress, format_metrics
from subquad.tasks.base import Task
from subquad.train.agreement import agree_on_checkpoint
from subquad.train.checkpoint import (
    BestMetric,
    Checkpoint,
    TrainState,
    best,
    checkpoint_folder,
    checkpoints,
    load_checkpoint,
    remove_surplus_checkpoints,
    save_checkpoint,
)
from subquad.train.distributed import (
    ALONE,
    DistributedLoss,
    TensorBatch,
    Workers,
    gather_to_first,
    shard_like,
    validate,
)
from subquad.train.from_run import RunStart
from subquad.train.metrics_log import MetricsLog
from subquad.train.optim import optimizer_state, restore_optimizer
from subquad.train.precision import DTYPES, MAX_SKIPPED, LossScale, allow_tf32, choose_precision
from subquad.train.recipe import End, Recipe
from subquad.train.rng import rng_state, seed_all, set_rng_state
from subquad.train.schedules import Schedule
from subquad.train.trackers import Tracker
from subquad.train.updater import LATE, SAVE, STOP, StepMetrics, Updater

SEEDS_APART = 1_000_003
EndsEarly = Callable[[], bool]


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
        ends_early: EndsEarly | None = None,
        start: RunStart | None = None,
    ) -> None:
        """workers: the processes that share every update; each takes its part of the batches.

        ends_early: asked after every validation whether the training ends here. start: what a run without checkpoints
        begins with; None: what its from_run.json says, or random weights.
        """
        self.start = start
        self.ends_early, self.ended_early = ends_early, False
        self.recipe, self.task, self.run, self.progress, self.trackers = recipe, task, run, progress, trackers
        if recipe.train.accumulate % workers.world:
            raise ValueError(
                f"train.accumulate is {recipe.train.accumulate}: {workers.world} processes cannot share these batches "
                f"evenly; make it a multiple of {workers.world}"
            )
        self.workers = workers
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = recipe.train
        seed_all(config.seed)
        options = recipe.model_data(task.data_dependent_model_config())
        self.model: Model = build_seeded(options, config.seed).to(self.device)
        if config.compile:
            compile_blocks(self.model)
        for module in self.model.modules():
            if isinstance(module, Stack):
                module.recompute = config.checkpoint_activations
        samples = {split: task.samples(split, training=split == "train") for split in ("train", "valid")}
        self.loader = BatchLoader(samples, config.data_workers, self.device, task.builds_in_processes)
        self.plan = BatchPlan(*samples["train"].sizes, budget=task.budget(config.budget), seed=config.seed)
        allow_tf32(config.tf32, self.device)
        self.precision = self._agree_on_precision()
        dtype = DTYPES[self.precision]
        self.loss = DistributedLoss(self.model, task.loss, workers, config.sharded, dtype, self._shortest_batch)
        scale = LossScale.of_sum(self._targets_of_update()) if self.precision == "float16" else None
        self.updater = Updater(self.loss, recipe.optim, self.device, scale)
        self.phases = self.updater.phases
        self.schedule = Schedule(recipe.schedule, config.updates, config.epochs)
        self.best_metric = BestMetric(task.metric, task.better)
        self.cursor, self.update, self.bad_validations = Cursor(), 0, 0
        self.late = False  # whether the first process's time is up, as of the last update
        self.save_late = False  # and whether it wants a checkpoint
        self.stop, self.stop_all = StopRequest(), False  # of this process; of any, as of the last exchange
        self.validated: int | None = None  # the update of the last validation
        self.saved: int | None = None  # and of the last checkpoint
        self.best: float | None = None
        self.metrics: dict[str, float] = {}
        self.log = MetricsLog(run / "metrics.jsonl") if workers.is_rank_zero else None
        self.started = self.saved_at = time.monotonic()
        seed_all(config.seed + SEEDS_APART * workers.rank)  # every process has the same weights, but draws of its own

    def _agree_on_precision(self) -> str:
        chosen = choose_precision(self.recipe.train.precision, self.device)
        if len(everywhere := sorted(set(self.workers.all_gather(chosen)))) > 1:
            raise ValueError(f"train.precision: auto means {' and '.join(everywhere)} on these GPUs; set it to one")
        return chosen

    def _shortest_batch(self) -> TensorBatch:
        shortest = np.argsort(self.plan.sizes, kind="stable")[:2]
        return next(self.loader.load("train", [(shortest, 0)]))

    def _targets_of_update(self) -> float:
        """About how many targets an update has: the tokens of its samples, or the samples."""
        sizes = self.plan.sizes.sum() - self.plan.sizes[self.plan.skipped].sum()
        return float(sizes) / len(self.plan.epoch(0)) * self.recipe.train.accumulate

    # ------------------------------------------------------------------ the run

    def fit(self) -> dict[str, float]:
        """Trains to the end of the recipe; returns the last validation's metrics.

        Ctrl-C and SIGTERM finish the update and save it; then KeyboardInterrupt says so.
        """
        if (path := agree_on_checkpoint(checkpoint_folder(self.run), self.workers)) is not None:
            with wrap_corrupt_data_errors(f"the checkpoint {path}"):
                self._resume(load_checkpoint(path))
            self.progress.note(f"resumed at update {self.update:,}, epoch {self.cursor.epoch + 1}")
            if (end := self._find_end()) is not None:
                self.progress.note(
                    f"nothing to train: the run stands at update {self.update:,}, where the recipe ends ({end.text}); "
                    "limits count from the start of the run"
                )
        elif (start := self.start or RunStart.read(self.run)) is not None:
            self._begin(start)
        elif self.log is not None and not self.log.is_new:  # a run that ended before its first checkpoint
            self.log.resumed(0)
        if self._find_end() is None and (note := self._unfinished_warmup()) is not None:
            self.progress.note(note)
        first = self.update
        with stop_requests() as self.stop, closing(self.loader), closing(self.updates()) as updates:
            while not self._is_interrupted():
                end = self._find_end()
                if self._is_validation_due(end is not None):
                    self._validate()
                elif end is not None:
                    self._report_end(end, first)
                    break
                else:
                    if self._is_checkpoint_due():
                        self._save()
                    next(updates)
            if self._is_interrupted():
                raise self._interrupt()
        if self.log is not None:
            self.log.close()
        folder = checkpoint_folder(self.run)
        kept = [*best(folder, self.best_metric, skip_damaged=True), *checkpoints(folder)]
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

    def _is_interrupted(self) -> bool:
        """Whether a signal ends the training; processes that share it agree on the update, or the validation."""
        return bool(self.stop) if self.workers.world == 1 else self.stop_all

    def _interrupt(self) -> KeyboardInterrupt:
        """Saves what was trained, and says what is kept."""
        if self.update and self.saved != self.update:
            self._save()
        if self.log is not None:
            self.log.close()
        for tracker in self.trackers:
            tracker.close()
        kept = f"update {self.update:,} is kept, and the same command goes on from it"
        return self.stop.error(kept if self.update else "nothing was trained yet, and the same command begins again")

    def _is_validation_due(self, ends: bool) -> bool:
        """Whether to validate before the next update. ends: whether there is none."""
        if self.validated == self.update:
            return ends and not self.metrics  # an imported run was never validated here
        every = self.recipe.train.validate_every
        epoch_end = self.cursor.batch == 0 if every is None else self.update % every == 0
        return ends or (self.update > 0 and epoch_end)

    def _find_end(self) -> End | None:
        """Which limit is reached. Nothing is exchanged: what only one process knows came with the last update."""
        return self.recipe.find_end(
            self.schedule,
            update=self.update,
            epoch=self.cursor.epoch,
            late=self._is_late() if self.workers.world == 1 else self.late,
            bad_validations=self.bad_validations,
            ended_early=self.ended_early,
        )

    def _report_end(self, end: End, first: int) -> None:
        """Says why the training ends. first: the update that it began at; if it did nothing, that was said before."""
        if self.update == first:
            return
        self.progress.note(f"update {self.update:,}: the training ends, {end.text}")
        if self.log is not None:
            self.log.write("end", self.update, {"reason": end.reason, "text": end.text})

    def _is_checkpoint_due(self) -> bool:
        """Whether a checkpoint is saved between validations, as `checkpoints.every_minutes` asks for."""
        late = self._is_save_late() if self.workers.world == 1 else self.save_late
        return late and self.update > 0 and self.saved != self.update

    def _is_save_late(self) -> bool:
        """Whether the last checkpoint is too old by this process's clock; see `_is_late`."""
        minutes = self.recipe.checkpoints.every_minutes
        return minutes is not None and self.workers.is_rank_zero and time.monotonic() - self.saved_at >= 60 * minutes

    def _is_late(self) -> bool:
        """Whether the time is up by this process's clock; in a run of several, the first one's decides for all."""
        minutes = self.recipe.train.minutes
        return minutes is not None and self.workers.is_rank_zero and self._minutes() >= minutes

    def updates(self) -> Generator[bool]:
        """Trains for as long as it is asked to: one update for each `next`, which says whether an epoch ended."""
        workers = self.workers
        planned = plan_updates(self.plan, self.cursor, self.recipe.train.accumulate, workers.rank, workers.world)
        plans, ahead = itertools.tee(planned)
        items = (item for plan in ahead for item in plan.batches)
        with closing(self.loader.load("train", items)) as built:
            while True:
                with self.phases("data"):
                    plan = next(plans)
                    batches = list(itertools.islice(built, len(plan.batches)))
                self.batches_of_epoch = plan.of_epoch
                self._step(batches, plan.idle)
                self.cursor = plan.after
                yield self.cursor.batch == 0

    def _step(self, batches: Sequence[TensorBatch], idle: bool) -> None:
        self.model.train()
        lr = self.schedule.learning_rate(self.update, self.cursor.epoch)
        failures = self.run / "failure" / ("" if self.workers.is_rank_zero else f"rank{self.workers.rank}")
        wishes = {LATE: self._is_late(), STOP: bool(self.stop), SAVE: self._is_save_late()}
        step = self.updater.step(batches, lr, failures, self.update, idle, wishes)
        self.update += not step.skipped  # as in fairseq, where a batch whose gradient overflows is no update
        self.late, self.stop_all, self.save_late = (step.wishes[name] for name in (LATE, STOP, SAVE))
        with self.phases("report"):
            if step.skipped:
                self._report_skipped()
            self._report(step)

    def _report(self, step: StepMetrics) -> None:
        metrics = self.task.metrics(step.sums, step.targets)
        shown = {"loss": step.loss, **{name: value for name, value in metrics.items() if name != "loss"}}
        scale = self.updater.scale
        shown |= {"skipped": scale.skipped} if scale is not None and scale.skipped else {}
        self.progress.show_update(
            self.cursor.epoch + 1, self.update, shown, step.targets, step.lr, self._share_done(), self.task.target_unit
        )
        if self.update % self.recipe.train.log_every == 0 and not step.skipped:
            speed = self.progress.targets_per_second()
            values = {**metrics, "train_loss": step.loss, "lr": step.lr, "norm": step.grad_norm}
            values |= {} if speed is None else {"targets_per_second": speed}
            values |= {} if scale is None else {"loss_scale": scale.scale, "skipped": scale.skipped}
            self._write("train", values)

    def _report_skipped(self) -> None:
        scale = self.updater.scale
        assert scale is not None
        self._write("skipped", {"loss_scale": scale.scale, "skipped": scale.skipped, "in_a_row": scale.in_a_row})
        self.progress.note(
            f"after update {self.update:,}: a batch is skipped, its gradient is not finite in float16; the loss scale "
            f"is now {scale.scale:g} ({scale.in_a_row} of {MAX_SKIPPED} in a row, {scale.skipped:,} in all)"
        )

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

    def _validate(self) -> None:
        with self.updater.ema.applied(self.model) if self.updater.ema is not None else nullcontext():
            metrics = validate(self.task, self.loss, self.loader, "valid", self._exchange_stop)
        if not metrics:  # it was interrupted
            return
        self.metrics, self.validated = metrics, self.update
        rank, best_name = self.best_metric.rank(metrics), self.best_metric.metric
        before = None if self.best is None else self.best_metric.rank({best_name: self.best})
        improved = rank is not None and (before is None or rank < before)
        self.best, self.bad_validations = (metrics[best_name], 0) if improved else (self.best, self.bad_validations + 1)
        self._write("valid", self.metrics)
        self.progress.note(
            f"update {self.update:,}: valid {format_metrics(self.metrics)}{' (best)' if improved else ''}"
        )
        self._save()
        self.ended_early = self.ends_early is not None and self.ends_early()
        self.progress.pause()

    def _exchange_stop(self) -> bool:
        """Whether any process was asked to stop; all must ask at once."""
        self.stop_all = self.workers.all_reduce({STOP: float(bool(self.stop))}, self.device)[STOP] > 0
        return self.stop_all

    def _save(self) -> None:
        """Saves a checkpoint. It gets the metrics of the last validation only if that was of the same update."""
        extra: dict[str, Any] = {"bad_validations": self.bad_validations, "best": self.best}
        extra |= {"minutes": self._minutes(), "precision": self.precision}
        if self.validated != self.update:
            extra["validated"] = False
        metrics, epoch_end = self.metrics if self.validated == self.update else {}, self.cursor.batch == 0
        scaler = {} if self.updater.scale is None else self.updater.scale.state()
        cursor, epoch = asdict(self.cursor), self.cursor.epoch
        state = TrainState(self.update, epoch, epoch_end, cursor, scaler, metrics, extra)
        content = Checkpoint(
            gather_to_first(self.model.state_dict(), self.workers),
            optimizer_state(self.updater.optimizer, self.model, self.workers),
            state,
            self.workers.gather_tensors(rng_state(), "rank"),
            self.updater.ema.state(self.workers) if self.updater.ema is not None else None,
        )
        if self.workers.is_rank_zero:
            save_checkpoint(checkpoint_folder(self.run), content)
            remove_surplus_checkpoints(checkpoint_folder(self.run), self.recipe.checkpoints, self.best_metric)
        self.workers.barrier()
        self.saved, self.saved_at = self.update, time.monotonic()

    def _begin(self, start: RunStart) -> None:
        """Takes over what a new run has of another one, and saves it as the first checkpoint of the run."""
        with wrap_corrupt_data_errors(f"the checkpoint {start.checkpoint}"):
            self._resume(start.first_checkpoint(self.recipe))
        anew = f"; {' and '.join(start.reset)} begin anew" if start.reset else ""
        self.progress.note(f"begins at update {self.update:,} with the weights of {start.checkpoint}{anew}")
        self._save()

    def _resume(self, saved: Checkpoint) -> None:
        own = self.model.state_dict()
        load_weights(self.model, {k: shard_like(v, own[k]) if k in own else v for k, v in saved.model.items()})
        restore_optimizer(self.updater.optimizer, self.model, saved.optimizer)
        if self.updater.ema is not None and saved.ema is not None:
            self.updater.ema.restore(saved.ema)
        if self.updater.scale is not None and saved.state.scaler:
            self.updater.scale.restore(saved.state.scaler)
        state = saved.state
        self.update, self.cursor, self.metrics = state.update, Cursor(**state.cursor), state.metrics
        self.saved, self.validated = state.update, state.update if state.extra.get("validated", True) else None
        self.bad_validations = int(state.extra["bad_validations"])
        self.best = None if state.extra["best"] is None else float(state.extra["best"])
        self.started = time.monotonic() - 60 * state.extra["minutes"]
        minutes = self.recipe.train.minutes  # all processes read the same file
        self.late = minutes is not None and state.extra["minutes"] >= minutes
        if self.log is not None:
            self.log.resumed(self.update)
        if (before := state.extra.get("precision", self.precision)) != self.precision:
            self.progress.note(f"the run was trained in {before} so far, and goes on in {self.precision}")
        mine = "" if self.workers.is_rank_zero else f"rank{self.workers.rank}."
        # more workers than before: those that are new go on with their seeds
        set_rng_state({name.removeprefix(mine): value for name, value in saved.rng.items() if name.startswith(mine)})
