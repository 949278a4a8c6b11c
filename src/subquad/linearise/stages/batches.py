"""What linearising reads: samples as batches of inputs and targets, in an order that the seed decides alone.

Every task is the same here: a model turns inputs into logits (..., classes), and each target is a class or IGNORED. A
causal language model's targets are its inputs, one position later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subquad.data.batches import to_device
from subquad.data.masking import Masking
from subquad.data.stable_rng import StableRng
from subquad.tasks import Task

IGNORED = -100
"""The target of a position that has none, as in transformers."""


class Batch(NamedTuple):
    """inputs: what the model is called with, by name. targets: (batch,) or (batch, time), classes or IGNORED.

    task: of a run, which calls the model itself, and whose mixed images have shares of all classes as their targets.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    task: Task | None = None

    def to(self, device: torch.device) -> Self:
        return type(self)(to_device(self.inputs, device), self.targets.to(device), self.task)


class Samples(Protocol):
    """A set of samples."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:
        """Returns the batch of these samples. seed: of what is random in them."""
        ...


@dataclass(frozen=True)
class Part:
    """Some samples of a set."""

    samples: Samples
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:
        return self.samples.batch([int(self.numbers[number]) for number in numbers], seed)


class TextBlocks:
    """Consecutive pieces of a text as inputs of a causal language model; each token is a target once."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        """tokens: (n,) of a whole text. length: of a piece."""
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:  # noqa: ARG002
        starts = np.asarray(numbers)[:, None] * self.length + np.arange(self.length + 1)
        rows = torch.from_numpy(self.tokens[starts].astype(np.int64))
        return Batch({"input_ids": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous())


class MaskedBlocks:
    """Consecutive pieces of a text in which some tokens are hidden: those are the targets."""

    def __init__(self, tokens: np.ndarray, length: int, masking: Masking) -> None:
        self.tokens, self.length, self.masking = tokens, length, masking

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:
        inputs, targets = [], []
        for number in numbers:
            piece = self.tokens[number * self.length : (number + 1) * self.length].astype(np.int64)
            hidden, is_target = self.masking.apply(piece, np.random.default_rng([seed, number]))
            inputs.append(torch.from_numpy(hidden))
            targets.append(torch.from_numpy(np.where(is_target, piece, IGNORED)))
        return Batch({"input_ids": torch.stack(inputs)}, torch.stack(targets))


class LabelledTexts:
    """Texts with a class each, padded to the longest of a batch."""

    def __init__(self, texts: Sequence[Sequence[int]], labels: Sequence[int], pad: int) -> None:
        self.texts, self.labels, self.pad = texts, labels, pad

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:  # noqa: ARG002
        rows = [torch.tensor(self.texts[number]) for number in numbers]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = torch.tensor([self.labels[number] for number in numbers])
        return Batch({"input_ids": ids, "attention_mask": mask}, labels)


class Images:
    """Images (n, channels, height, width) as a model reads them, with a class each."""

    def __init__(self, pixels: Tensor, labels: Tensor, name: str = "pixel_values") -> None:
        """name: of the model's input."""
        self.pixels, self.labels, self.name = pixels, labels, name

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:  # noqa: ARG002
        chosen = torch.as_tensor(list(numbers))
        return Batch({self.name: self.pixels[chosen]}, self.labels[chosen])


class Batches(Protocol):
    """The batch of every update: a `Batch`, or what else has a method `to`."""

    def __getitem__(self, update: int, /) -> Any: ...


class TrainingBatches:
    """The batch of every update, from its number alone, so that training can go on anywhere.

    Every epoch has another order; samples that do not fill a batch are left to the next epoch's order.
    """

    def __init__(self, samples: Samples, size: int, seed: int) -> None:
        if not len(samples):
            raise ValueError("there are no samples to train on; give more text, or a smaller --length")
        self.samples, self.size, self.seed = samples, min(size, len(samples)), seed
        self.of_epoch = len(samples) // self.size
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __getitem__(self, update: int) -> Batch:
        epoch, place = divmod(update, self.of_epoch)
        if self._order[0] != epoch:
            self._order = epoch, StableRng(1_000_003 * self.seed + epoch).permutation(len(self.samples))
        chosen = self._order[1][place * self.size : (place + 1) * self.size]
        return self.samples.batch([int(number) for number in chosen], 1_000_003 * self.seed + update)


@dataclass(frozen=True)
class LaterBatches:
    """The batches from update number `first` on."""

    batches: Batches
    first: int

    def __getitem__(self, update: int) -> Any:
        return self.batches[self.first + update]


def hold_out(samples: Samples, share: float) -> tuple[Part, Part]:
    """Splits samples into those to train on and the last ones, which are held out. At least one is."""
    count = len(samples)
    held = max(1, round(share * count))
    if held >= count:
        raise ValueError(f"{count} samples are too few to hold some of them out; give more, or --valid")
    return Part(samples, np.arange(count - held)), Part(samples, np.arange(count - held, count))


def thin_out(samples: Samples, most: int) -> Samples:
    """Returns at most so many samples, evenly spaced."""
    if len(samples) <= most:
        return samples
    return Part(samples, np.unique(np.linspace(0, len(samples) - 1, most).astype(np.int64)))
