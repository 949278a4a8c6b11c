"""Turns images into the tensors that a model reads: standardised at their own size, or with DeiT's augmentation.

The work has two parts. Pixels are built image by image on the CPU, by worker processes if there are any, and 8-bit
pixels stay bytes. A whole batch is normalised and erased on the device of the model, where a copy of bytes arrives in a
quarter of the time that float32 would take.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from subquad.data.images.mixup import inside_boxes
from subquad.data.images.sets import ImageSet
from subquad.data.images.transforms import AugmentOptions, Erasure, EvalTransform, TrainTransform

CHUNK = 1024  # images that statistics are computed from at a time


class InputTransform(ABC):
    """From an image to pixels, and from a batch of pixels to what a model reads."""

    def __init__(self, shape: Sequence[int], mean: Sequence[float], std: Sequence[float]) -> None:
        """shape: (C, H, W) of what the model reads; mean and std: one number for each channel."""
        self.shape = tuple(shape)
        self.mean = torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(std, dtype=torch.float32)[:, None, None]
        self.constants: dict[torch.device, tuple[Tensor, Tensor]] = {}  # mean and std, copied to a device once

    @abstractmethod
    def pixels(self, image: Any, generator: torch.Generator | None) -> tuple[np.ndarray, Erasure | None]:
        """Returns pixels (C, H, W), of which 8-bit ones stay uint8 and others are float32, and what is erased.

        generator: of the random choices of training; None: there are none.
        """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns JSON-compatible data from which `transform_from` makes the transform again."""

    def normalise(self, images: Tensor) -> Tensor:
        """Returns float32 images (..., C, H, W): (pixels - mean) / std; pixels of 8 bits are first scaled to 0 to 1."""
        if images.device not in self.constants:
            self.constants[images.device] = (self.mean.to(images.device), self.std.to(images.device))
        mean, std = self.constants[images.device]
        if images.dtype == torch.uint8:
            return images.float().div_(255).sub_(mean).div_(std)
        return (images - mean).div_(std)


class Standardize(InputTransform):
    """Subtracts the mean of the training images from arrays (C, H, W) and divides by their deviation, by channel."""

    kind = "standardise"

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
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return {"kind": self.kind, "shape": list(self.shape), "mean": mean, "std": std}

    def pixels(self, image: np.ndarray, generator: torch.Generator | None) -> tuple[np.ndarray, None]:  # noqa: ARG002
        return image if image.dtype == np.uint8 else np.array(image, np.float32), None


def _unit(image: np.ndarray) -> np.ndarray:
    """Returns a float32 copy, in which 8-bit pixels are scaled to 0 to 1 and others are unchanged."""
    pixels = np.array(image, np.float32)
    return pixels / 255 if image.dtype == np.uint8 else pixels


class Augmented(InputTransform):
    """The transforms of training if a generator is given, and otherwise those of evaluation."""

    kind = "augmented"

    def __init__(self, options: AugmentOptions) -> None:
        super().__init__((len(options.mean), options.size, options.size), options.mean, options.std)
        self.options = options
        self.training, self.evaluation = TrainTransform(options), EvalTransform(options)

    def __reduce__(self) -> tuple[type[Self], tuple[AugmentOptions]]:
        return type(self), (self.options,)  # a worker process has no use for what is on a device

    def pixels(self, image: Any, generator: torch.Generator | None) -> tuple[np.ndarray, Erasure | None]:
        return (self.evaluation(image), None) if generator is None else self.training(image, generator)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": self.options.model_dump(mode="json")}


def transform_from(described: Mapping[str, Any]) -> InputTransform:
    """Returns the transform whose `to_json()` is given."""
    if described["kind"] == Augmented.kind:
        return Augmented(AugmentOptions.parse("transform", described["options"]))
    assert described["kind"] == Standardize.kind, described["kind"]
    return Standardize(described["shape"], described["mean"], described["std"])


def image_tensor(transform: InputTransform, name: str, image: Any) -> Tensor:
    """Returns the tensor that the model reads. image: an RGB image of Pillow, or an array (C, H, W).

    name: the name of the image, for messages.
    """
    if isinstance(transform, Standardize):
        wanted = transform.shape
        if not isinstance(image, np.ndarray):  # decoded: RGB
            image = np.atleast_3d(np.asarray(image.convert("L") if wanted[0] == 1 else image)).transpose(2, 0, 1)
        if image.shape != wanted:
            raise ValueError(f"{name} is {image.shape} (channels, height, width); this model reads {wanted}")
    try:
        pixels, _ = transform.pixels(image, None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return transform.normalise(torch.from_numpy(np.array(pixels)))


# ---------------------------------------------------------------------- batches


def stack_pixels(pixels: Sequence[np.ndarray], shape: tuple[int, ...]) -> Tensor:
    """Returns images (B, C, H, W): uint8 if all of them have 8 bits, else float32. shape: (C, H, W)."""
    for image in pixels:
        if image.shape != shape:
            raise ValueError(
                f"images have different sizes, {image.shape} and {shape} (channels, height, width): give data.augment, "
                "with the size that the model reads"
            )
    whole = all(image.dtype == np.uint8 for image in pixels)
    images = np.empty((len(pixels), *shape), np.uint8 if whole else np.float32)
    for place, image in enumerate(pixels):
        images[place] = image if whole else _unit(image)
    return torch.from_numpy(images)


def stack_erasures(erasures: Sequence[Erasure | None]) -> dict[str, Tensor]:
    """Returns what is erased in a batch, for `erase_boxes`; empty if nothing is.

    erased: (n,) int64, numbers of images; boxes: (n, 4) int64, top, bottom, left and right; noise: float32, the numbers
    of all boxes one after the other.
    """
    found = {place: erasure for place, erasure in enumerate(erasures) if erasure is not None}
    if not found:
        return {}
    return {
        "erased": torch.tensor(list(found)),
        "boxes": torch.tensor([erasure.box for erasure in found.values()]),
        "noise": torch.cat([erasure.noise.flatten() for erasure in found.values()]),
    }


def erase_boxes(images: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
    """Fills boxes of normalised images (B, C, H, W) with noise, in place; nothing is read back from the device."""
    if "erased" not in drawn:
        return images
    chosen = images[drawn["erased"]]
    chosen.masked_scatter_(inside_boxes(drawn["boxes"], images.shape[-2:]).expand_as(chosen), drawn["noise"])
    return images.index_copy_(0, drawn["erased"], chosen)
