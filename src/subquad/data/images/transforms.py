"""Transforms from an image to the pixels that a model reads, for training and for evaluation, as DeiT uses them.

Touvron et al., "Training data-efficient image transformers", 2021. All random numbers come from the caller's generator.
8-bit images (of Pillow, or uint8 arrays) can have every transform; float arrays only cropping, flipping and erasing.
8-bit pixels stay so: a batch is normalised, erased and mixed on the device that trains (see inputs.py).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Options
from subquad.data.images.randaugment import RandAugment, Random
from subquad.packages import require_torchvision

TRIES = 10  # random boxes that are tried before a crop takes the centre, or erasing gives up
MAX_ASPECT = 100  # the largest ratio of sides; evaluation crops longer images to their centre first


class AugmentOptions(Options):
    """How images are transformed in training and evaluation."""

    size: int = Field(224, ge=1, description="The side of the square images that the model reads.")
    crop: Literal["resized", "pad", "none"] = Field(
        "resized",
        description="In training. resized: a random part of the image is resized; pad: the image is padded by 4 pixels "
        "and cut at random, for small images; none: the whole image is resized.",
    )
    scale: tuple[float, float] = Field(
        (0.08, 1.0), description="The least and the largest part of the area that a resized crop shows."
    )
    ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="The least and the largest width / height of a resized crop."
    )
    flip: float = Field(0.5, ge=0, le=1, description="The probability of a horizontal flip.")
    randaugment: str | None = Field(
        "rand-m9-mstd0.5-inc1", description="RandAugment in the notation of timm; null turns it off."
    )
    jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="The largest change of brightness, contrast and saturation. timm uses none with RandAugment.",
    )
    erase: float = Field(0.25, ge=0, le=1, description="The probability that a box is filled with noise.")
    eval_crop: float = Field(
        0.875,
        gt=0,
        le=1,
        description="In evaluation: the side of the centre that is shown, as a part of the short side.",
    )
    mean: tuple[float, ...] = Field((0.485, 0.456, 0.406), description="The mean of each channel, which is subtracted.")
    std: tuple[float, ...] = Field(
        (0.229, 0.224, 0.225), description="The standard deviation of each channel, which is divided by."
    )

    def check(self) -> None:
        if self.randaugment is not None:
            RandAugment.parse(self.randaugment)
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError("mean and std must have one number for each channel, and std must be above 0")
        if not 0 < self.scale[0] <= self.scale[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError("scale and ratio must be (least, most) above 0, and scale at most 1")


class Erasure(NamedTuple):
    """A part of a normalised image that normal noise replaces.

    box: its top, bottom, left and right. noise: (C, bottom - top, right - left).
    """

    box: tuple[int, int, int, int]
    noise: Tensor


class ImageTransform:
    """What training and evaluation share: conversion and resizing."""

    def __init__(self, options: AugmentOptions) -> None:
        self.options = options
        self.functional = require_torchvision()
        self.bicubic = self.functional.InterpolationMode.BICUBIC

    def convert(self, image: Any) -> Any:
        """Returns an image of Pillow if the input has 8 bits, else a float tensor (C, H, W)."""
        if isinstance(image, np.ndarray):
            dtype = np.float32 if image.dtype.kind == "f" else image.dtype.newbyteorder("=")
            image = torch.from_numpy(np.array(image, dtype))
        if not isinstance(image, Tensor):
            return image
        if image.dtype == torch.uint8:
            return self.functional.to_pil_image(image)
        if not image.is_floating_point():
            raise ValueError(f"images must be 8-bit or float, not {image.dtype}")
        return image.float()

    def to_pixels(self, image: Any) -> np.ndarray:
        """Returns an array (C, size, size), uint8 or float32."""
        pixels = image.numpy() if isinstance(image, Tensor) else np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        if len(pixels) != len(self.options.mean):
            channels = len(self.options.mean)
            raise ValueError(f"images have {len(pixels)} channels, but mean and std are for {channels}")
        return pixels

    def resize(self, image: Any, size: list[int]) -> Any:
        if self.image_size(image) == tuple(size):
            return image
        return self.functional.resize(image, size, interpolation=self.bicubic, antialias=True)

    def image_size(self, image: Any) -> tuple[int, int]:
        height, width = self.functional.get_size(image)
        return height, width


class EvalTransform(ImageTransform):
    """Resizes the short side to size / eval_crop, and crops the centre."""

    def __call__(self, image: Any) -> np.ndarray:
        image = self.convert(image)
        height, width = self.image_size(image)
        if max(height, width) > MAX_ASPECT * min(
            height, width
        ):  # resizing would turn a line of pixels into a huge stripe
            image = self.functional.center_crop(
                image, [min(height, MAX_ASPECT * width), min(width, MAX_ASPECT * height)]
            )
            height, width = self.image_size(image)
        short = math.floor(self.options.size / self.options.eval_crop)
        if min(height, width) != short:
            scale = short / min(height, width)
            image = self.resize(image, [max(short, int(height * scale)), max(short, int(width * scale))])
        return self.to_pixels(self.functional.center_crop(image, [self.options.size, self.options.size]))


class TrainTransform(ImageTransform):
    """Crops, flips, applies RandAugment and colour jitter, and draws what is erased."""

    def __init__(self, options: AugmentOptions) -> None:
        super().__init__(options)
        self.randaugment = RandAugment.parse(options.randaugment) if options.randaugment is not None else None

    def __call__(self, image: Any, generator: torch.Generator) -> tuple[np.ndarray, Erasure | None]:
        rng, options = Random(generator), self.options
        image = self.random_crop(self.convert(image), rng)
        if rng.happens(options.flip):
            image = self.functional.horizontal_flip(image)
        if self.randaugment is not None or options.jitter:
            if isinstance(image, Tensor):
                raise ValueError(
                    "RandAugment and jitter need 8-bit images, but these are float: set randaugment to null"
                )
            if self.randaugment is not None:
                bands = len(image.getbands())
                image = self.randaugment(image, rng, [round(255 * value) for value in options.mean[:bands]])
            if options.jitter:
                image = self.jitter_colours(image, rng)
        pixels = self.to_pixels(image)
        return pixels, draw_erasure(pixels.shape, generator) if rng.happens(options.erase) else None

    def random_crop(self, image: Any, rng: Random) -> Any:
        size = [self.options.size, self.options.size]
        if self.options.crop == "none":
            return self.resize(image, size)
        if self.options.crop == "pad":
            padded = self.functional.pad(self.resize(image, size), [4, 4, 4, 4])
            return self.functional.crop(padded, rng.below(9), rng.below(9), *size)
        box = crop_box(self.image_size(image), self.options.scale, self.options.ratio, rng)
        return self.functional.resized_crop(image, *box, size, interpolation=self.bicubic, antialias=True)

    def jitter_colours(self, image: Any, rng: Random) -> Any:
        changes = ("adjust_brightness", "adjust_contrast", "adjust_saturation")
        for number in rng.permutation(len(changes)):
            factor = rng.uniform(1 - self.options.jitter, 1 + self.options.jitter)
            image = getattr(self.functional, changes[number])(image, factor)
        return image


def crop_box(
    image_size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], rng: Random
) -> tuple[int, int, int, int]:
    """Returns (top, left, height, width) of a random part with an area within `scale` and width / height in `ratio`."""
    height, width = image_size
    for _ in range(TRIES):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return rng.below(height - high + 1), rng.below(width - wide + 1), high, wide
    aspect = min(max(width / height, ratio[0]), ratio[1])  # no box fitted: the largest centre of a permitted shape
    wide = min(width, max(1, round(height * aspect)))
    high = min(height, max(1, round(width / aspect)))
    return (height - high) // 2, (width - wide) // 2, high, wide


def draw_erasure(shape: Sequence[int], generator: torch.Generator) -> Erasure | None:
    """Draws a box of 2 to 33 % of the area of an image of `shape` (C, H, W); None if no box fitted."""
    rng = Random(generator)
    channels, height, width = shape
    for _ in range(TRIES):
        area = height * width * rng.uniform(0.02, 1 / 3)
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        high, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < high < height and 0 < wide < width:
            top, left = rng.below(height - high + 1), rng.below(width - wide + 1)
            noise = torch.randn((channels, high, wide), generator=generator)
            return Erasure((top, top + high, left, left + wide), noise)
    return None
