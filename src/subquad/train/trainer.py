"""The trainer: batches to losses to gradients to updates, with validation, checkpoints and a log.

    Trainer.fit          until a limit of the recipe is reached
      Trainer.updates    plans an epoch, builds its batches, and makes one update for each `next`
        Updater.step     passes of all batches, one sum over all processes, clipping, the optimiser
      validate           the task's metrics on a split
      Trainer._save      weights, optimiser, generators, and the place in the epoch

The gradient of an update is the summed loss of its batches over the number of their targets. The order of the data
depends on the seed and the epoch only, and the random choices inside a batch on the seed and its place; a checkpoint
holds weights, optimiser, generators and the place in the epoch, so a resumed run is the uninterrupted one, bit by bit.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from subquad.data.batches import BatchPlan, Cursor, UpdatePlan, batch_seed, plan_updates, prefetch, to_device
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
    COUNT,
    DistributedLoss,
    TensorBatch,
    Workers,
    add_sums,
    gather_to_first,
    shard_like,
    validate,
)
from subquad.train.metrics_log import MetricsLog
from subquad.train.nan_diagnosis import NotFiniteError, diagnose
from subquad.train.optim import (
    Ema,
    OptimConfig,
    build_optimizer,
    clip_gradients,
    optimizer_state,
    restore_optimizer,
    scale_gradients,
    set_learning_rate,
)
from subquad.train.profiler import Phases
from subquad.train.recipe import Recipe
from subquad.train.rng import rng_state, seed_all, set_rng_state, torch_rng_state
from subquad.train.schedules import Schedule
from subquad.train.trackers import Tracker

SEEDS_APART = 1_000_003
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LOSS, LATE, STOP = ".loss", ".late", ".stop"  # names that no task uses
Attempt = tuple[TensorBatch, dict[str, Tensor]]
EndsEarly = Callable[[], bool]


@dataclass(frozen=True)
class StepMetrics:
    """What an update did.

    loss: what was minimised, for each target. sums: see `LossOutput`, over all batches and processes; targets: so many.
    grad_norm: before clipping. lr: the learning rate. late: whether the first process's time is up. stop: whether any
    process was asked to stop.
    """

    loss: float
    sums: dict[str, float]
    targets: int
    grad_norm: float
    lr: float
    late: bool = False
    stop: bool = False


# ---------------------------------------------------------------------- one update


class Updater:
    """A model's optimiser, and all that stands between a loss and an update."""

    def __init__(self, loss: DistributedLoss, config: OptimConfig, device: torch.device, half: bool = False) -> None:
        """half: gradients of float16 are scaled against underflow."""
        self.loss, self.model, self.config, self.device = loss, loss.model, config, device
        self.optimizer = build_optimizer(config, self.model)
        self.ema = Ema(self.model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=half)
        self.phases = Phases()

    def step(
        self,
        batches: Sequence[TensorBatch],
        lr: float,
        failures: Path,
        update: int = 0,
        idle: bool = False,
        late: bool = False,
        stop: bool = False,
    ) -> StepMetrics:
        """An update from the sum of the losses of all processes' `batches`, by the learning rate `lr`.

        idle: the last batch is another process's, and counts for nothing. late, stop: whether this process wants the
        run to end or to be interrupted, which travels along with the sums. A loss or gradient that is not finite raises
        NotFiniteError before anything is changed; what reproduces it is then in the folder `failures`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        attempts: list[Attempt] = []
        sums: dict[str, Tensor | float] = {LATE: float(late), STOP: float(stop)}
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            attempts.append((batch, torch_rng_state()))
            with nullcontext() if last else self.loss.no_sync():
                self._differentiate(batch, sums, counts=not (idle and last))
        totals = self.loss.workers.all_reduce(sums, self.device)
        total, count = totals.pop(LOSS), int(totals.pop(COUNT))
        late, stop = totals.pop(LATE) > 0, totals.pop(STOP) > 0
        with self.phases("optimiser"):
            self.scaler.unscale_(self.optimizer)
            scale_gradients(self.model.parameters(), 1 / max(1, count))
            norm = float(clip_gradients(self.model.parameters(), self.config.clip))
            if not self.scaler.is_enabled() and not (math.isfinite(total) and math.isfinite(norm)):
                raise self._diagnose(attempts, failures, update)
            set_learning_rate(self.optimizer, lr)
            self.scaler.step(self.optimizer)  # in half precision it leaves out an update that is not finite
            self.scaler.update()
            if self.ema is not None:
                self.ema.update(self.model)
        return StepMetrics(total / max(1, count), totals, count, norm, lr, late, stop)

    def _differentiate(self, batch: TensorBatch, sums: dict[str, Tensor | float], counts: bool) -> None:
        """Adds a batch's gradients to the parameters', and its loss and numbers to `sums`."""
        with self.phases("forward"):
            found = self.loss(batch)
        with self.phases("backward"):
            self.scaler.scale(found.total if counts else found.total * 0).backward()
        add_sums(sums, {**found.sums, LOSS: found.total.detach(), COUNT: float(found.count)}, counts)

    def _diagnose(self, attempts: Sequence[Attempt], failures: Path, update: int) -> NotFiniteError:
        model, loss_of = self.loss.unwrapped()
        return diagnose(model, lambda batch: loss_of(batch).total, attempts, failures, update)


# ---------------------------------------------------------------------- the run


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
    ) -> None:
        """workers: the processes that share every update; each takes its part of the batches.

        ends_early: asked after every validation whether the training ends here.
        """
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
        dtype = PRECISIONS.get(config.precision)
        self.loss = DistributedLoss(self.model, task.loss, workers, config.sharded, dtype)
        self.updater = Updater(self.loss, recipe.optim, self.device, config.precision == "float16")
        self.phases = self.updater.phases
        self.samples = task.samples("train", training=True)
        self.plan = BatchPlan(*self.samples.sizes, budget=task.budget(config.budget), seed=config.seed)
        self.schedule = Schedule(recipe.schedule, config.updates, config.epochs)
        self.best_metric = BestMetric(task.metric, task.better)
        self.cursor, self.update, self.bad_validations = Cursor(), 0, 0
        self.late = False  # whether the first process's time is up, as of the last update
        self.stop, self.stop_all = StopRequest(), False  # of this process; of any, as of the last exchange
        self.validated: int | None = None  # the update of the last validation
        self.saved: int | None = None  # and of the last checkpoint
        self.best: float | None = None
        self.metrics: dict[str, float] = {}
        self.log = MetricsLog(run / "metrics.jsonl") if workers.is_rank_zero else None
        self.started = time.monotonic()
        seed_all(config.seed + SEEDS_APART * workers.rank)  # every process has the same weights, but draws of its own

    # ------------------------------------------------------------------ the run

    def fit(self) -> dict[str, float]:
        """Trains to the end of the recipe; returns the last validation's metrics.

        Ctrl-C and SIGTERM finish the update and save it; then KeyboardInterrupt says so.
        """
        if (path := agree_on_checkpoint(checkpoint_folder(self.run), self.workers)) is not None:
            with wrap_corrupt_data_errors(f"the checkpoint {path}"):
                self._resume(path)
            if self._should_stop():
                self.progress.note(
                    f"nothing to train: the run stands at update {self.update:,}, where the recipe ends; limits count "
                    "from the start of the run"
                )
        elif self.log is not None and not self.log.is_new:  # a run that ended before its first checkpoint
            self.log.resumed(0)
        if not self._should_stop() and (note := self._unfinished_warmup()) is not None:
            self.progress.note(note)
        with stop_requests() as self.stop, closing(self.updates()) as updates:
            while not self._is_interrupted():
                ends = self._should_stop()
                if self._is_validation_due(ends):
                    self._validate()
                elif ends:
                    break
                else:
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

    def _should_stop(self) -> bool:
        """Whether a limit is reached. Nothing is exchanged: what only one process knows came with the last update."""
        config = self.recipe.train
        return (
            self.ended_early
            or (config.updates is not None and self.update >= config.updates)
            or (config.epochs is not None and self.cursor.epoch >= config.epochs)
            or (self._is_late() if self.workers.world == 1 else self.late)
            or (config.patience is not None and self.bad_validations >= config.patience)
            or self.schedule.finished(self.update, self.cursor.epoch)
        )

    def _is_late(self) -> bool:
        """Whether the time is up by this process's clock; in a run of several, the first one's decides for all."""
        minutes = self.recipe.train.minutes
        return minutes is not None and self.workers.is_rank_zero and self._minutes() >= minutes

    def updates(self) -> Generator[bool]:
        """Trains for as long as it is asked to: one update for each `next`, which says whether an epoch ended."""
        accumulate, threads = self.recipe.train.accumulate, self.recipe.train.data_workers
        while True:
            with self.phases("data"):
                plans = plan_updates(self.plan, self.cursor, accumulate, self.workers.rank, self.workers.world)
                self.batches_of_epoch = self.cursor.batch + sum(plan.used for plan in plans)
            with closing(prefetch(self._build_batches, plans, threads)) as built:
                for plan in plans:
                    with self.phases("data"):
                        batches = [to_device(batch, self.device) for batch in next(built)]
                    self._step(batches, plan.idle)
                    self.cursor = self.cursor.after(plan.used, self.batches_of_epoch)
                    yield self.cursor.batch == 0

    def _build_batches(self, plan: UpdatePlan) -> list[dict[str, Tensor]]:
        seed = self.plan.seed
        return [self.samples.batch(numbers, batch_seed(seed, *astuple(place))) for numbers, place in plan.batches]

    def _step(self, batches: Sequence[TensorBatch], idle: bool) -> None:
        self.model.train()
        lr = self.schedule.learning_rate(self.update, self.cursor.epoch)
        failures = self.run / "failure" / ("" if self.workers.is_rank_zero else f"rank{self.workers.rank}")
        step = self.updater.step(batches, lr, failures, self.update, idle, self._is_late(), bool(self.stop))
        self.update, self.late, self.stop_all = self.update + 1, step.late, step.stop
        with self.phases("report"):
            self._report(step)

    def _report(self, step: StepMetrics) -> None:
        metrics = self.task.metrics(step.sums, step.targets)
        shown = {"loss": step.loss, **{name: value for name, value in metrics.items() if name != "loss"}}
        self.progress.show_update(self.cursor.epoch + 1, self.update, shown, step.targets, step.lr, self._share_done())
        if self.update % self.recipe.train.log_every == 0:
            speed = self.progress.targets_per_second()
            values = {**metrics, "train_loss": step.loss, "lr": step.lr, "norm": step.grad_norm}
            values |= {} if speed is None else {"targets_per_second": speed}
            self._write("train", values)

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
            threads = self.recipe.train.data_workers
            metrics = validate(self.task, self.loss, "valid", self.device, threads, self._exchange_stop)
        if not metrics:  # it was interrupted
            return
        self.metrics, self.validated = metrics, self.update
        value, sign = self.metrics[self.task.metric], 1 if self.task.better == "lower" else -1
        improved = self.best is None or sign * value < sign * self.best
        self.best, self.bad_validations = (value, 0) if improved else (self.best, self.bad_validations + 1)
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
        extra = {"bad_validations": self.bad_validations, "best": self.best, "minutes": self._minutes()}
        if self.validated != self.update:
            extra["validated"] = False
        metrics, epoch_end = self.metrics if self.validated == self.update else {}, self.cursor.batch == 0
        scaler = dict(self.updater.scaler.state_dict())
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
        self.saved = self.update

    def _resume(self, path: Path) -> None:
        saved = load_checkpoint(path)
        own = self.model.state_dict()
        load_weights(self.model, {k: shard_like(v, own[k]) if k in own else v for k, v in saved.model.items()})
        restore_optimizer(self.updater.optimizer, self.model, saved.optimizer)
        if self.updater.ema is not None and saved.ema is not None:
            self.updater.ema.restore(saved.ema)
        if saved.state.scaler:
            self.updater.scaler.load_state_dict(saved.state.scaler)
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
        self.progress.note(f"resumed at update {self.update:,}, epoch {self.cursor.epoch + 1}")
        mine = "" if self.workers.is_rank_zero else f"rank{self.workers.rank}."
        # more workers than before: those that are new go on with their seeds
        set_rng_state({name.removeprefix(mine): value for name, value in saved.rng.items() if name.startswith(mine)})
