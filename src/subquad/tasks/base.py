"""What the trainer needs of a task: samples with sizes, batches of them, a loss, and numbers for people.

A task knows its data and nothing about optimisation. Losses are sums, so that the trainer divides once, by the targets
of all micro-batches and workers together.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from subquad.data.batches import Batch, Budget
from subquad.data.tokenizers import Tokenizer
from subquad.files import write_metadata
from subquad.models import Model
from subquad.tasks.losses import Loss

INPUTS, TOKENIZERS = "inputs.json", "tokenizers"
INPUTS_FORMAT = 1


class Samples(Protocol):
    """A split of a task's data."""

    sizes: tuple[np.ndarray, ...]
    """Tokens of every sample, eos included: one array for each side."""

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        """The samples of these numbers as tensors; padding is True where there is nothing.

        seed: of the random choices, where there are any; the result depends on nothing else. Threads call it at once.
        """
        ...


@dataclass(frozen=True)
class StepLoss:
    """What a batch costs. total: to differentiate; sums: numbers that add up over batches; count: targets."""

    total: Tensor
    sums: dict[str, float]
    count: int


class Task(ABC):
    """One kind of task on one data set."""

    name: ClassVar[str]
    better: ClassVar[str] = "lower"
    """Which values of `metric` are better."""
    metric: ClassVar[str] = "loss"
    """The validation metric that says which checkpoint is best."""

    def __init__(self, smoothing: float, aux_weight: float) -> None:
        """smoothing: of the targets. aux_weight: what the mixers' regulariser counts beside the loss of a target."""
        self.smoothing, self.aux_weight = smoothing, aux_weight

    @abstractmethod
    def samples(self, split: str, training: bool) -> Samples:
        """A split; `training` may shuffle, augment or cut it otherwise than validation does."""

    @abstractmethod
    def model_options(self) -> dict[str, Any]:
        """What the data decides about the model: vocabularies, classes."""

    @abstractmethod
    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> StepLoss:
        """The loss of a batch, summed over its targets."""

    @abstractmethod
    def budget(self, budget: Budget) -> Budget:
        """The limits of a batch, where the task knows better than the recipe's defaults."""

    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizers of inputs and outputs, by side; a task without text has none."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """What else turns raw inputs into the model's and its outputs into words, as plain data."""
        return {}

    def save_inputs(self, folder: Path) -> None:
        """Writes inputs.json and tokenizers/ beside the weights, so that using the model needs no training data."""
        write_inputs(folder, self.name, self.tokenizers(), self.model_options(), self.inputs())

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Numbers for people from sums over `count` targets."""
        mean = {name: value / max(1, count) for name, value in sums.items()}
        return {"loss": mean.pop("nll"), **mean}

    def with_aux(self, loss: Loss, aux: Tensor | None) -> StepLoss:
        """The loss and, apart from it, the mixers' regulariser, which counts once for every target."""
        sums = {"nll": float(loss.nll)}
        if aux is None:
            return StepLoss(loss.total, sums, loss.count)
        regulariser = aux.float().mean()
        total = loss.total + self.aux_weight * loss.count * regulariser if self.aux_weight else loss.total
        return StepLoss(total, sums | {"regulariser": float(regulariser.detach()) * loss.count}, loss.count)


def write_inputs(
    folder: Path,
    task: str,
    tokenizers: Mapping[str, Tokenizer],
    model_options: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> None:
    """inputs.json and tokenizers/ of a run: see `Task.tokenizers`, `Task.model_options` and `Task.inputs`."""
    for side, tokenizer in tokenizers.items():
        tokenizer.save(folder / TOKENIZERS / side)
    write_metadata(folder / INPUTS, {"format": INPUTS_FORMAT, "task": task, "model": dict(model_options), **inputs})


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Perplexity, of the plain loss of targets: neither smoothing nor regularisers are in it."""
    return metrics | {"ppl": math.exp(min(700.0, metrics["loss"]))}


def moved(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
