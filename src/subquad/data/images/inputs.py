"""Turns an image into the tensor that a model reads: standardised at its own size, or with DeiT's augmentation."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from subquad.data.images.sets import ImageSet
from subquad.data.images.transforms import AugmentOptions, EvalTransform, TrainTransform

CHUNK = 1024  # images that statistics are computed from at a time


class Standardize:
    """Subtracts the mean of the training images from arrays (C, H, W) and divides by their deviation, by channel."""

    kind = "standardise"

    def __init__(self, shape: tuple[int, ...], mean: Sequence[float], std: Sequence[float]) -> None:
        """shape: (C, H, W) of every image; mean and std: one number for each channel."""
        self.shape = tuple(shape)
        self.mean = torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(std, dtype=torch.float32)[:, None, None]

    @classmethod
    def of(cls, images: ImageSet) -> Self:
        """Returns the transform with the mean and deviation of these images."""
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

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-compatible data from which `transform_from` makes the transform again."""
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return {"kind": self.kind, "shape": list(self.shape), "mean": mean, "std": std}

    def __call__(self, image: np.ndarray, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002
        return (torch.from_numpy(_unit(image)) - self.mean) / self.std


def _unit(image: np.ndarray) -> np.ndarray:
    """Returns a float32 copy, in which 8-bit pixels are scaled to 0 to 1 and others are unchanged."""
    pixels = np.array(image, np.float32)
    return pixels / 255 if image.dtype == np.uint8 else pixels


class Augmented:
    """The transforms of training if a generator is given, and otherwise those of evaluation."""

    kind = "augmented"

    def __init__(self, options: AugmentOptions) -> None:
        self.options = options
        self.training, self.evaluation = TrainTransform(options), EvalTransform(options)
        self.shape = (len(options.mean), options.size, options.size)

    def __call__(self, image: Any, generator: torch.Generator | None) -> Tensor:
        return self.evaluation(image) if generator is None else self.training(image, generator)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-compatible data from which `transform_from` makes the transform again."""
        return {"kind": self.kind, "options": self.options.model_dump(mode="json")}


def transform_from(described: Mapping[str, Any]) -> Standardize | Augmented:
    """Returns the transform whose `to_json()` is given."""
    if described["kind"] == Augmented.kind:
        return Augmented(AugmentOptions.parse("transform", described["options"]))
    assert described["kind"] == Standardize.kind, described["kind"]
    return Standardize(described["shape"], described["mean"], described["std"])


def image_tensor(transform: Standardize | Augmented, name: str, image: Any) -> Tensor:
    """Returns the tensor that the model reads. image: an RGB image of Pillow, or an array (C, H, W).

    name: the name of the image, for messages.
    """
    if not isinstance(transform, Standardize):
        try:
            return transform(image, None)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    wanted = tuple(transform.shape)
    if not isinstance(image, np.ndarray):  # decoded: RGB
        image = np.atleast_3d(np.asarray(image.convert("L") if wanted[0] == 1 else image)).transpose(2, 0, 1)
    if image.shape != wanted:
        raise ValueError(f"{name} is {image.shape} (channels, height, width); this model reads {wanted}")
    return transform(image, None)
