"""The loss of a model on a batch, and its evaluation with the statistics of every sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.evaluate.accuracy import accuracy, class_ranks
from subquad.evaluate.measure import Measure
from subquad.linearise.stages.batches import IGNORED, Batch, Samples

SEED = 0
"""Of what is random in the samples of an evaluation: it is the same every time."""


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns what a model computes of a batch, (..., classes)."""
    if batch.task is not None:
        return batch.task.logits(model, batch.inputs)
    options: dict[str, Any] = {"use_cache": False} if _has_cache(model) else {}
    found = model(**batch.inputs, **options)
    logits = getattr(found, "logits", found)
    return logits[0] if isinstance(logits, tuple) else logits


def _has_cache(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "use_cache")


def task_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy over the targets: classes (...), or the shares of all classes (batch, classes)."""
    if targets.is_floating_point():
        return F.cross_entropy(logits.float(), targets)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


def distillation_loss(logits: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of KL(teacher || student) over the positions that have a target."""
    logits, teacher = logits.flatten(0, -2), teacher.flatten(0, -2)
    if not targets.is_floating_point():
        counts = targets.flatten() != IGNORED
        logits, teacher = logits[counts], teacher[counts]
    ours, theirs = F.log_softmax(logits.float(), -1), F.log_softmax(teacher.float(), -1)
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


@dataclass(frozen=True)
class Score:
    """The evaluation of a model. losses: (samples, 2), summed -log p and its targets. hits: (samples,) of classifiers.

    Neighbouring pieces of a text are too much alike to count as independent: runs of sqrt(n) of them are one sample
    of an interval, as in `evaluate.perplexity`.
    """

    losses: np.ndarray
    hits: np.ndarray | None

    def loss(self) -> Measure:
        rows = self.losses
        if self.hits is None:
            rows = np.add.reduceat(rows, np.arange(0, len(rows), max(1, round(math.sqrt(len(rows))))))
        return Measure(rows, lambda sums: float(sums[0] / sums[1]), "mean -log p in nats", "lower", decimals=3)

    def measures(self) -> dict[str, Measure]:
        """Returns the loss in nats, and the accuracy where there are classes; the first is the main one."""
        if self.hits is None:
            return {"loss": self.loss()}
        return {"accuracy": accuracy(self.hits, "top-1"), "loss": self.loss()}

    def to_json(self) -> dict[str, Any]:
        return {"losses": self.losses.tolist(), "hits": None if self.hits is None else self.hits.tolist()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Score":
        hits = content["hits"]
        return cls(np.array(content["losses"]), None if hits is None else np.array(hits))


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, size: int, report: Callable[[str], None] = lambda _: None) -> Score:
    """Evaluates a model in eval mode on all samples, `size` at a time."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    losses, hits = [], []
    for start in range(0, len(samples), size):
        batch = samples.batch(range(start, min(start + size, len(samples))), SEED).to(device)
        logits = logits_of(model, batch)
        rows = logits.flatten(0, -2).float()
        each = F.cross_entropy(rows, batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        each, counts = each.view_as(batch.targets), batch.targets != IGNORED
        if batch.targets.dim() == 1:
            hits.append((class_ranks(logits, batch.targets) == 0).cpu().numpy())
            losses.append(torch.stack([each, counts.float()], 1).cpu().double().numpy())
        else:
            losses.append(torch.stack([each.double().sum(1), counts.double().sum(1)], 1).cpu().numpy())
        report(f"{start + len(batch.targets)} of {len(samples)} samples")
    model.train(training)
    return Score(np.concatenate(losses), np.concatenate(hits) if hits else None)
