"""Image classification: a class for each image.

With augmentation options, training images go through DeiT's transforms and the others through those of evaluation.
Without, images are taken as they are (arrays of one size) and normalised by the mean and deviation of the training
images; nothing beside numpy is needed then. Every random choice of a batch comes from a generator of its own, with the
seed that the trainer gives it, so a resumed run makes the batches of the uninterrupted one.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from subquad.data.batches import Batch, Budget
from subquad.data.images.mixup import MixingOptions, mix_batch
from subquad.data.images.sets import ImageSet
from subquad.data.images.transforms import AugmentOptions, EvalTransform, TrainTransform
from subquad.evaluate.accuracy import class_ranks, tops
from subquad.models import Model
from subquad.tasks.base import StepLoss, Task
from subquad.tasks.losses import class_loss

CHUNK = 1024  # images that statistics are computed from at a time
NAMED = 3  # unreadable images that a batch's warning names


class Standardise:
    """Arrays (C, H, W) with the mean of the training images taken out, over their deviation, for every channel."""

    kind = "standardise"

    def __init__(self, shape: tuple[int, ...], mean: Sequence[float], std: Sequence[float]) -> None:
        """shape: (C, H, W) of every image; mean and std: one number for each channel."""
        self.shape = tuple(shape)
        self.mean = torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(std, dtype=torch.float32)[:, None, None]

    @classmethod
    def of(cls, images: ImageSet) -> Self:
        """With the mean and deviation of these images."""
        first = images[0][0]
        if not isinstance(first, np.ndarray):
            raise ValueError("encoded images may have any size: give data.augment, with the size that the model reads")
        count, total, squares = 0, np.zeros(first.shape[0]), np.zeros(first.shape[0])
        for start in range(0, len(images), CHUNK):
            taken = images.take(np.arange(start, min(start + CHUNK, len(images))))
            pixels = np.stack([_unit(image) for image, _ in taken]).astype(np.float64)
            count += pixels[:, 0].size
            total += pixels.sum((0, 2, 3))
            squares += np.square(pixels).sum((0, 2, 3))
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        std[std == 0] = 1  # a channel that never changes says nothing
        return cls(first.shape, mean.tolist(), std.tolist())

    def to_checksummed_json(self) -> dict[str, Any]:
        """Plain data from which `transform_from` makes it again."""
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return {"kind": self.kind, "shape": list(self.shape), "mean": mean, "std": std}

    def __call__(self, image: np.ndarray, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002
        return (torch.from_numpy(_unit(image)) - self.mean) / self.std


def _unit(image: np.ndarray) -> np.ndarray:
    """A float32 copy; 8-bit pixels become 0 to 1, others are what they are."""
    pixels = np.array(image, np.float32)
    return pixels / 255 if image.dtype == np.uint8 else pixels


class Augmented:
    """The transforms of training where a generator is given, else those of evaluation."""

    kind = "augmented"

    def __init__(self, options: AugmentOptions) -> None:
        self.options = options
        self.training, self.evaluation = TrainTransform(options), EvalTransform(options)
        self.shape = (len(options.mean), options.size, options.size)

    def __call__(self, image: Any, generator: torch.Generator | None) -> Tensor:
        return self.evaluation(image) if generator is None else self.training(image, generator)

    def to_checksummed_json(self) -> dict[str, Any]:
        """Plain data from which `transform_from` makes it again."""
        return {"kind": self.kind, "options": self.options.model_dump(mode="json")}


def transform_from(described: Mapping[str, Any]) -> Standardise | Augmented:
    """The transform that gave `to_checksummed_json()`."""
    if described["kind"] == Augmented.kind:
        return Augmented(AugmentOptions.parse("transform", described["options"]))
    assert described["kind"] == Standardise.kind, described["kind"]
    return Standardise(described["shape"], described["mean"], described["std"])


class ImageSamples:
    """Labelled images, each counting as one token, and how they become batches."""

    def __init__(
        self,
        images: ImageSet,
        transform: Standardise | Augmented,
        training: bool = False,
        mixing: MixingOptions | None = None,
        repeated: int = 1,
    ) -> None:
        """training: images are augmented, mixed and repeated; otherwise they are shown once, as they are."""
        self.images, self.transform, self.training = images, transform, training
        self.mixing, self.repeated = (mixing, repeated) if training else (None, 1)
        self.sizes: tuple[np.ndarray, ...] = (np.ones(len(images), np.int64),)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        """images (B, C, H, W); labels (B,); after mixing also targets (B, classes). Unreadable images are left out."""
        # A batch of repeated augmentation shows its first images several times instead of the others: batches are
        # random, so an epoch shows a random part of the images.
        taken = self._take(np.repeat(numbers, self.repeated)[: len(numbers)])
        generator = torch.Generator().manual_seed(seed) if self.training else None
        images = torch.empty(len(taken), *self.transform.shape)
        for place, (image, _) in enumerate(taken):
            made = self.transform(image, generator)
            if made.shape != images.shape[1:]:
                raise ValueError(
                    f"images have different sizes, {tuple(made.shape)} and {self.transform.shape} (channels, height, "
                    "width): give data.augment, with the size that the model reads"
                )
            images[place] = made
        labels = torch.tensor([label for _, label in taken], dtype=torch.int64)
        if self.mixing is None or generator is None:
            return {"images": images, "labels": labels}
        images, targets = mix_batch(images, labels, len(self.images.classes), self.mixing, generator)
        return {"images": images, "labels": targets.argmax(1), "targets": targets}

    def _take(self, numbers: Batch) -> list[tuple[Any, int]]:
        known = set(self.images.skipped)
        taken = self.images.take(numbers)
        if new := [reason for name, reason in self.images.skipped.items() if name not in known]:
            more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
            warnings.warn(f"left out: {'; '.join(new[:NAMED])}{more}", stacklevel=2)
        return taken


class ClassificationTask(Task):
    name = "image-classification"
    metric = "top1"
    better = "higher"

    def __init__(
        self,
        splits: Mapping[str, ImageSet],
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        augment: AugmentOptions | None = None,
        mixing: MixingOptions | None = None,
        repeated: int = 1,
    ) -> None:
        """smoothing: of labels; that of mixed targets is an option of mixing."""
        super().__init__(smoothing, aux_weight)
        self.splits, self.mixing, self.repeated = splits, mixing, repeated
        self.transform = Standardise.of(splits["train"]) if augment is None else Augmented(augment)

    def samples(self, split: str, training: bool) -> ImageSamples:
        if split not in self.splits:
            raise ValueError(f"the data has no split {split!r}; it has {', '.join(self.splits)}")
        return ImageSamples(self.splits[split], self.transform, training, self.mixing, self.repeated)

    def model_options(self) -> dict[str, Any]:
        channels, height, width = self.transform.shape
        if height != width:
            raise ValueError(f"images of {width} x {height} pixels are not square: give data.augment, with a size")
        return {"classes": len(self.splits["train"].classes), "channels": channels, "image_size": height}

    def inputs(self) -> dict[str, Any]:
        return {"classes": list(self.splits["train"].classes), "transform": self.transform.to_checksummed_json()}

    def budget(self, budget: Budget) -> Budget:
        """Images count by number: max_tokens would be that of sequences."""
        return budget.model_copy(update={"max_tokens": None, "max_sentences": budget.max_sentences or 64})

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> StepLoss:
        logits, _, aux = model(batch["images"])
        labels = batch["labels"]
        if "targets" in batch:
            loss = class_loss(logits, batch["targets"])
        else:
            loss = class_loss(logits, labels, smoothing=self.smoothing)
        found = self.with_aux(loss, aux)
        ranks = class_ranks(logits.detach(), labels)
        hits = {f"top{most}": float((ranks < most).sum()) for most in tops(logits.shape[-1])}
        return replace(found, sums=found.sums | hits)

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Images that could not be read so far are counted as `unreadable`."""
        metrics = super().metrics(sums, count)
        unreadable = {name for images in self.splits.values() for name in images.skipped}
        return metrics | {"unreadable": len(unreadable)} if unreadable else metrics
