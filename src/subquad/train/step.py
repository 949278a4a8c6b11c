"""One update: gradients of some batches, summed, divided by their targets, clipped, and applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from subquad.tasks.base import StepLoss
from subquad.train.checkpoint import rng_state
from subquad.train.distributed import Workers
from subquad.train.health import diagnose, is_finite
from subquad.train.optim import Ema, OptimConfig, build_optimizer, clip_gradients, scale_gradients, set_rate

ALONE = Workers()
LOSS, COUNT = ".loss", ".count"  # names that no task uses
TensorBatch = Mapping[str, Tensor]
LossOf = Callable[[TensorBatch], StepLoss]


@dataclass(frozen=True)
class Stepped:
    """What an update did. loss: what was minimised, for each target; sums: see StepLoss; norm: before clipping."""

    loss: float
    sums: dict[str, float]
    count: int
    norm: float


class Updater:
    """A model's optimiser, and all that stands between a loss and an update."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        device: torch.device,
        half: bool = False,
        workers: Workers = ALONE,
    ) -> None:
        """half: gradients of float16 are scaled against underflow."""
        self.model, self.config, self.workers = model, config, workers
        self.optimizer = build_optimizer(config, model)
        self.ema = Ema(model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=half)

    def step(
        self, batches: Sequence[TensorBatch], loss_of: LossOf, rate: float, failures: Path, update: int = 0
    ) -> Stepped:
        """An update from the sum of the losses of all workers' `batches`, by the learning rate `rate`.

        A loss or gradient that is not finite raises NotFiniteError before anything is changed; what reproduces it is
        then in the folder `failures`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        seen: list[tuple[TensorBatch, dict[str, Tensor]]] = []
        sums: dict[str, float] = {}
        count, total = 0, 0.0
        for batch in batches:
            seen.append((batch, rng_state()))
            found = loss_of(batch)
            self.scaler.scale(found.total).backward()
            total += float(found.total.detach())
            count += found.count
            for name, value in found.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        self.workers.sum_gradients(self.model.parameters())
        sums = self.workers.sum_numbers({**sums, LOSS: total, COUNT: count})
        total, count = sums.pop(LOSS), int(sums.pop(COUNT))
        self.scaler.unscale_(self.optimizer)
        scale_gradients(self.model.parameters(), 1 / max(1, count))
        norm = clip_gradients(self.model.parameters(), self.config.clip)
        if not self.scaler.is_enabled() and not is_finite(torch.tensor(total), norm):
            raise diagnose(self.model, lambda batch: loss_of(batch).total, seen, failures, update)
        set_rate(self.optimizer, rate)
        self.scaler.step(self.optimizer)  # in half precision it leaves out an update that is not finite
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.model)
        return Stepped(total / max(1, count), sums, count, float(norm))
