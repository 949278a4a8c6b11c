"""One update: the passes of its batches, one sum over all processes, clipping, and the optimiser.

The gradient of an update is the summed loss of its batches over the number of their targets. Sums, counts and the norm
of the gradient stay on the device until the last backward pass is launched. Then they are read at once, and decide
about the update: it is the one moment at which the CPU waits for a GPU.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from subquad.train.diagnostics.nan_diagnosis import NotFiniteError, diagnose
from subquad.train.diagnostics.profiler import Phases
from subquad.train.distributed import COUNT, DistributedLoss, TensorBatch, add_sums
from subquad.train.optim import (
    Ema,
    OptimConfig,
    build_optimizer,
    clip_gradients,
    scale_gradients,
    set_learning_rate,
)
from subquad.train.precision import MAX_SKIPPED, LossScale
from subquad.train.rng import torch_rng_state

LOSS, LATE, STOP, SAVE = ".loss", ".late", ".stop", ".save"  # names that no task uses
WISHES = (LATE, STOP, SAVE)
"""What any process may want of all: that the run ends for its time, or is interrupted, or saves a checkpoint."""
Attempt = tuple[TensorBatch, dict[str, Tensor]]


@dataclass(frozen=True)
class StepMetrics:
    """What an update did.

    loss: what was minimised, for each target. sums: see `LossOutput`, over all batches and processes; targets: so many.
    grad_norm: before clipping. lr: the learning rate. wishes: for each of WISHES whether any process has it. skipped:
    whether the gradient was not finite in float16, so that nothing was changed.
    """

    loss: float
    sums: dict[str, float]
    targets: int
    grad_norm: float
    lr: float
    wishes: Mapping[str, bool]
    skipped: bool = False


class Updater:
    """A model's optimiser, and all that stands between a loss and an update."""

    def __init__(
        self, loss: DistributedLoss, config: OptimConfig, device: torch.device, scale: LossScale | None = None
    ) -> None:
        """scale: of the loss in float16, and only there."""
        self.loss, self.model, self.config, self.device = loss, loss.model, config, device
        self.optimizer = build_optimizer(config, self.model)
        self.ema = Ema(self.model, config.ema) if config.ema else None
        self.scale = scale
        self.phases = Phases()

    def step(
        self,
        batches: Sequence[TensorBatch],
        lr: float,
        failures: Path,
        update: int = 0,
        idle: bool = False,
        wishes: Mapping[str, bool] | None = None,
    ) -> StepMetrics:
        """An update from the sum of the losses of all processes' `batches`, by the learning rate `lr`.

        idle: the last batch is another process's, and counts for nothing. wishes: what this process wants of all, by
        WISHES, which travels along with the sums. A loss or gradient that is not finite raises NotFiniteError before
        anything is changed, in float16 after MAX_SKIPPED updates of that kind in a row; what reproduces it is then in
        the folder `failures`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        attempts: list[Attempt] = []
        sums: dict[str, Tensor | float] = {name: float((wishes or {}).get(name, False)) for name in WISHES}
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            attempts.append((batch, torch_rng_state()))
            with nullcontext() if last else self.loss.no_sync():
                self._differentiate(batch, sums, counts=not (idle and last))
        with self.phases("optimiser"):
            totals, norm = self._divide_and_clip(sums)
            total, count = totals.pop(LOSS), int(totals.pop(COUNT))
            agreed = {name: totals.pop(name) > 0 for name in WISHES}
            is_finite = math.isfinite(total) and math.isfinite(norm)
            skipped = self.scale is not None and self.scale.update(total, norm)
            if not is_finite and (self.scale is None or self.scale.diverged):
                raise self._diagnose(attempts, failures, update)
            if not skipped:
                set_learning_rate(self.optimizer, lr)
                self.optimizer.step()
                if self.ema is not None:
                    self.ema.update(self.model)
        return StepMetrics(total / max(1, count), totals, count, norm, lr, agreed, skipped)

    def _differentiate(self, batch: TensorBatch, sums: dict[str, Tensor | float], counts: bool) -> None:
        """Adds a batch's gradients to the parameters', and its loss and numbers to `sums`."""
        with self.phases("forward"):
            found = self.loss(batch)
        with self.phases("backward"):
            scale = float(counts) if self.scale is None else counts * self.scale.scale
            (found.total if scale == 1 else found.total * scale).backward()
        add_sums(sums, {**found.sums, LOSS: found.total.detach(), COUNT: float(found.count)}, counts)

    def _divide_and_clip(self, sums: Mapping[str, Tensor | float]) -> tuple[dict[str, float], float]:
        """Turns summed gradients into those of an update; returns all processes' sums, and the norm before clipping."""
        names, parameters = sorted(sums), list(self.model.parameters())
        totals = self.loss.workers.all_reduce_on_device(sums, self.device)
        targets = totals[names.index(COUNT)].clamp(min=1)
        scale_gradients(parameters, 1 / (targets if self.scale is None else targets * self.scale.scale))
        norm = clip_gradients(parameters, self.config.clip)
        *values, read = torch.cat([totals, norm.double()[None]]).tolist()  # the CPU waits here, and only here
        return dict(zip(names, values, strict=True)), read

    def _diagnose(self, attempts: Sequence[Attempt], failures: Path, update: int) -> NotFiniteError:
        model, loss_of = self.loss.unwrapped()
        if self.scale is None:
            return diagnose(model, lambda batch: loss_of(batch).total, attempts, failures, update)
        scale = self.scale.scale
        tried = f" after {MAX_SKIPPED} skipped updates in a row, at the loss scale {scale:g} of float16"
        return diagnose(model, lambda batch: loss_of(batch).total * scale, attempts, failures, update, tried)
