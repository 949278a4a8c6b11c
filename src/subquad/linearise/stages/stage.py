"""One stage of training: updates with a learning rate by schedule, checkpoints, and a log. It resumes bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.linearise.stages.batches import Batches
from subquad.processes import StopRequest
from subquad.progress import Progress
from subquad.train.checkpoint import (
    BestMetric,
    Checkpoint,
    CheckpointRetention,
    TrainState,
    checkpoint_folder,
    latest,
    load_checkpoint,
    remove_surplus_checkpoints,
    save_checkpoint,
)
from subquad.train.metrics_log import MetricsLog
from subquad.train.optim import (
    OptimConfig,
    build_optimizer,
    clip_gradients,
    optimizer_state,
    restore_optimizer,
    set_learning_rate,
)
from subquad.train.rng import rng_state, seed_all, set_rng_state
from subquad.train.schedules import Schedule, ScheduleConfig

CLIP = 1.0
WARMUP = 0.05
"""The share of a stage's updates in which the learning rate rises."""
RETENTION = CheckpointRetention(keep_last=2, keep_best=0)

Backward = Callable[[Any], dict[str, float]]
"""Adds the gradients of a batch to the parameters, and returns the losses by name; the first is shown."""


@dataclass(frozen=True)
class Plan:
    """How long a stage trains, and how. save_every: updates between checkpoints."""

    name: str
    updates: int
    lr: float
    seed: int
    save_every: int

    def learning_rates(self) -> Schedule:
        warmup = min(self.updates - 1, max(1, round(WARMUP * self.updates)))
        config = ScheduleConfig(kind="cosine", lr=self.lr, min_lr=self.lr / 100, warmup_updates=warmup)
        return Schedule(config, self.updates)


class Stage:
    """Trains the parameters of a module that require gradients; call `fit`."""

    def __init__(self, plan: Plan, trained: nn.Module, backward: Backward, folder: Path) -> None:
        """trained: has all parameters that this stage trains. folder: where its checkpoints and its log go."""
        self.plan, self.trained, self.backward, self.folder = plan, trained, backward, folder
        config = OptimConfig(name="adamw", betas=(0.9, 0.95), weight_decay=0.01, decay_vectors=False)
        self.optimizer = build_optimizer(config, trained)
        self.parameters = [p for p in trained.parameters() if p.requires_grad]
        self.update = 0

    def fit(self, batches: Batches, stop: StopRequest, progress: Progress) -> None:
        """Trains to the end of the plan, from the newest checkpoint on. A request to stop saves, and raises."""
        plan, rates = self.plan, self.plan.learning_rates()
        seed_all(plan.seed)
        self._resume(progress)
        log = MetricsLog(self.folder / "metrics.jsonl")
        if not log.is_new:
            log.resumed(self.update)
        device = self.parameters[0].device
        saved = self.update
        try:
            while self.update < plan.updates and not stop:
                rate = rates.learning_rate(self.update)
                losses = self.step(batches[self.update].to(device), rate)
                log.write("train", self.update, {**losses, "lr": rate})
                shown = [f"{plan.name} {self.update:,} of {plan.updates:,}"]
                progress.update([*shown, *(f"{name} {value:.4g}" for name, value in losses.items())])
                if self.update % plan.save_every == 0 or self.update == plan.updates:
                    self._save()
                    saved = self.update
            if stop and saved != self.update:
                self._save()
        finally:
            log.close()
        if stop:
            raise stop.error(f"{plan.name}: update {self.update:,} is kept, and the same command goes on from it")

    def step(self, batch: Any, rate: float) -> dict[str, float]:
        """Makes one update, and returns its losses."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.backward(batch)
        norm = clip_gradients(self.parameters, CLIP)
        if not torch.isfinite(norm):
            raise ValueError(
                f"{self.plan.name}, update {self.update + 1}: the gradient is not finite; a lower learning rate helps"
            )
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.update += 1
        return losses

    # ------------------------------------------------------------------ checkpoints

    def _state(self) -> dict[str, Tensor]:
        """What training changes: the trained parameters, and all buffers."""
        trained = {name for name, p in self.trained.named_parameters() if p.requires_grad}
        frozen = {name for name, _ in self.trained.named_parameters()} - trained
        return {name: value for name, value in self.trained.state_dict().items() if name not in frozen}

    def _save(self) -> None:
        state = TrainState(update=self.update)
        content = Checkpoint(self._state(), optimizer_state(self.optimizer, self.trained), state, rng_state())
        save_checkpoint(checkpoint_folder(self.folder), content)
        remove_surplus_checkpoints(checkpoint_folder(self.folder), RETENTION, BestMetric())

    def _resume(self, progress: Progress) -> None:
        if (path := latest(checkpoint_folder(self.folder))) is None:
            return
        saved = load_checkpoint(path)
        own = self._state()
        if own.keys() != saved.model.keys():
            odd = sorted(own.keys() ^ saved.model.keys())[0]
            raise ValueError(f"{path} is of another model: {odd!r} is not in both; give another --out")
        with torch.no_grad():
            for name, value in saved.model.items():
                own[name].copy_(value)
        restore_optimizer(self.optimizer, self.trained, saved.optimizer)
        set_rng_state(saved.rng)
        self.update = saved.state.update
        progress.note(f"{self.plan.name}: goes on after update {self.update:,} of {self.plan.updates:,}")
