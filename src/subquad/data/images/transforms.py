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
from torch.nn.functional import interpolate, pad

from subquad.config import Options
from subquad.data.images.randaugment import RandAugment, Random
from subquad.packages import require

PAD = 4  # pixels at each side of a small image, before it is cut at random
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
    """What training and evaluation share: conversion, cropping and resizing."""

    def __init__(self, options: AugmentOptions) -> None:
        self.options = options
        self.pillow = require("PIL.Image", "image augmentation", "vision", package="Pillow")

    def convert(self, image: Any) -> Any:
        """Returns an image of Pillow if the input has 8 bits, else a float tensor (C, H, W)."""
        if isinstance(image, Tensor):
            image = image.numpy()
        if not isinstance(image, np.ndarray):
            return image
        if image.dtype == np.uint8:
            return self.pillow.fromarray(
                np.ascontiguousarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
            )
        if image.dtype.kind != "f":
            raise ValueError(f"images must be 8-bit or float, not {image.dtype}")
        return torch.from_numpy(np.array(image, np.float32))

    def to_pixels(self, image: Any) -> np.ndarray:
        """Returns an array (C, size, size), uint8 or float32."""
        pixels = image.numpy() if isinstance(image, Tensor) else np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        if len(pixels) != len(self.options.mean):
            channels = len(self.options.mean)
            raise ValueError(f"images have {len(pixels)} channels, but mean and std are for {channels}")
        return pixels

    def resize(self, image: Any, height: int, width: int) -> Any:
        """Resizes with bicubic interpolation, which averages over all pixels that a smaller image stands for."""
        if image_size(image) == (height, width):
            return image
        if isinstance(image, Tensor):
            return interpolate(image[None], (height, width), mode="bicubic", antialias=True)[0]
        return image.resize((width, height), self.pillow.Resampling.BICUBIC)


def image_size(image: Any) -> tuple[int, int]:
    """Returns (height, width) of an image of Pillow or a tensor (C, H, W)."""
    height, width = image.shape[1:] if isinstance(image, Tensor) else image.size[::-1]
    return height, width


def crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    """Returns a part that lies inside the image."""
    if isinstance(image, Tensor):
        return image[:, top : top + height, left : left + width]
    return image.crop((left, top, left + width, top + height))


def crop_centre(image: Any, height: int, width: int) -> Any:
    high, wide = image_size(image)
    return crop(image, round((high - height) / 2), round((wide - width) / 2), height, width)


class EvalTransform(ImageTransform):
    """Resizes the short side to size / eval_crop, and crops the centre."""

    def __call__(self, image: Any) -> np.ndarray:
        image = self.convert(image)
        height, width = image_size(image)
        if max(height, width) > MAX_ASPECT * min(height, width):  # resizing would turn a line into a huge stripe
            image = crop_centre(image, min(height, MAX_ASPECT * width), min(width, MAX_ASPECT * height))
            height, width = image_size(image)
        short = math.floor(self.options.size / self.options.eval_crop)
        if min(height, width) != short:
            scale = short / min(height, width)
            image = self.resize(image, max(short, int(height * scale)), max(short, int(width * scale)))
        return self.to_pixels(crop_centre(image, self.options.size, self.options.size))


class TrainTransform(ImageTransform):
    """Crops, flips, applies RandAugment and colour jitter, and draws what is erased."""

    def __init__(self, options: AugmentOptions) -> None:
        super().__init__(options)
        self.image_ops = require("PIL.ImageOps", "image augmentation", "vision", package="Pillow")
        self.randaugment = RandAugment.parse(options.randaugment) if options.randaugment is not None else None

    def __call__(self, image: Any, generator: torch.Generator) -> tuple[np.ndarray, Erasure | None]:
        rng, options = Random(generator), self.options
        image = self.random_crop(self.convert(image), rng)
        if rng.happens(options.flip):
            image = (
                image.flip(-1) if isinstance(image, Tensor) else image.transpose(self.pillow.Transpose.FLIP_LEFT_RIGHT)
            )
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
        side = self.options.size
        if self.options.crop == "none":
            return self.resize(image, side, side)
        if self.options.crop == "pad":
            image = self.resize(image, side, side)
            padded = pad(image, [PAD] * 4) if isinstance(image, Tensor) else self.image_ops.expand(image, PAD)
            return crop(padded, rng.below(2 * PAD + 1), rng.below(2 * PAD + 1), side, side)
        box = crop_box(image_size(image), self.options.scale, self.options.ratio, rng)
        return self.resize(crop(image, *box), side, side)

    def jitter_colours(self, image: Any, rng: Random) -> Any:
        enhance = require("PIL.ImageEnhance", "image augmentation", "vision", package="Pillow")
        changes = (enhance.Brightness, enhance.Contrast, enhance.Color)
        for number in rng.permutation(len(changes)):
            factor = rng.uniform(1 - self.options.jitter, 1 + self.options.jitter)
            image = changes[number](image).enhance(factor)
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
