"""One update: gradients of some batches, summed, divided by their targets, clipped, and applied."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from subquad.train.nan_diagnosis import NotFiniteError, diagnose, is_finite
from subquad.train.optim import Ema, OptimConfig, build_optimizer, clip_gradients, scale_gradients, set_rate
from subquad.train.parallel import SharedLoss, TensorBatch
from subquad.train.profiler import Phases
from subquad.train.rng import rng_state

LOSS, COUNT = ".loss", ".count"  # names that no task uses
Attempt = tuple[TensorBatch, dict[str, Tensor]]


@dataclass(frozen=True)
class Stepped:
    """What an update did. loss: what was minimised, for each target; sums: see LossOutput; norm: before clipping."""

    loss: float
    sums: dict[str, float]
    count: int
    norm: float


class Updater:
    """A model's optimiser, and all that stands between a loss and an update."""

    def __init__(self, loss: SharedLoss, config: OptimConfig, device: torch.device, half: bool = False) -> None:
        """half: gradients of float16 are scaled against underflow."""
        self.loss, self.model, self.config = loss, loss.model, config
        self.optimizer = build_optimizer(config, self.model)
        self.ema = Ema(self.model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=half)
        self.phases = Phases()

    def step(
        self, batches: Sequence[TensorBatch], rate: float, failures: Path, update: int = 0, idle: bool = False
    ) -> Stepped:
        """An update from the sum of the losses of all workers' `batches`, by the learning rate `rate`.

        idle: the last batch is another worker's, and counts for nothing. A loss or gradient that is not finite raises
        NotFiniteError before anything is changed; what reproduces it is then in the folder `failures`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        seen: list[Attempt] = []
        sums: dict[str, float] = {}
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            seen.append((batch, rng_state()))
            with nullcontext() if last else self.loss.unsummed():
                found = self._differentiate(batch, counts=not (idle and last))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        sums = self.loss.workers.sum_numbers(sums)
        total, count = sums.pop(LOSS), int(sums.pop(COUNT))
        with self.phases("optimiser"):
            self.scaler.unscale_(self.optimizer)
            scale_gradients(self.model.parameters(), 1 / max(1, count))
            norm = clip_gradients(self.model.parameters(), self.config.clip)
            if not self.scaler.is_enabled() and not is_finite(torch.tensor(total), norm):
                raise self._diagnosed(seen, failures, update)
            set_rate(self.optimizer, rate)
            self.scaler.step(self.optimizer)  # in half precision it leaves out an update that is not finite
            self.scaler.update()
            if self.ema is not None:
                self.ema.update(self.model)
        return Stepped(total / max(1, count), sums, count, float(norm))

    def _differentiate(self, batch: TensorBatch, counts: bool) -> dict[str, float]:
        """Adds a batch's gradients; its sums, with the loss and the number of targets among them."""
        with self.phases("forward"):
            found = self.loss(batch)
        with self.phases("backward"):
            self.scaler.scale(found.total if counts else found.total * 0).backward()
        if not counts:
            return {}
        sums = {name: float(value) for name, value in found.sums.items()}
        return {**sums, LOSS: float(found.total.detach()), COUNT: found.count}

    def _diagnosed(self, seen: Sequence[Attempt], failures: Path, update: int) -> NotFiniteError:
        model, loss_of = self.loss.alone()
        return diagnose(model, lambda batch: loss_of(batch).total, seen, failures, update)
