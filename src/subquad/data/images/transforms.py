"""From an image to the tensor that a model reads: DeiT's transforms of training, and those of evaluation.

Touvron et al., "Training data-efficient image transformers", 2021. All draws come from the generator of the caller.
8-bit images (Pillow's, or uint8 arrays) can have everything; float arrays cropping, flipping and erasing only.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Options
from subquad.data.images.randaugment import Chance, RandAugment
from subquad.data.images.torchvision import import_torchvision

TRIES = 10  # draws of a box before a crop takes the centre, and an erasure gives up
MOST_ASPECT = 100  # of an image; of a longer one evaluation sees the centre, as it does of every image


class AugmentOptions(Options):
    size: int = Field(224, ge=1, description="side of the images that the model reads")
    crop: Literal["resized", "pad", "none"] = Field(
        "resized",
        description="training: a random part, resized; or the image padded by 4 pixels and cut at random (small "
        "images); or resized as it is",
    )
    scale: tuple[float, float] = Field((0.08, 1.0), description="part of the area that a resized crop shows")
    ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="width / height of a resized crop")
    flip: float = Field(0.5, ge=0, le=1, description="probability of mirroring left and right")
    randaugment: str | None = Field("rand-m9-mstd0.5-inc1", description="RandAugment in timm's notation; null: none")
    jitter: float = Field(
        0.0, ge=0, lt=1, description="change of brightness, contrast and saturation; timm has none beside RandAugment"
    )
    erase: float = Field(0.25, ge=0, le=1, description="probability of filling a box with noise")
    eval_crop: float = Field(0.875, gt=0, le=1, description="evaluation: side of the centre that is shown (224 of 256)")
    mean: tuple[float, ...] = Field((0.485, 0.456, 0.406), description="subtracted, for every channel")
    std: tuple[float, ...] = Field((0.229, 0.224, 0.225), description="divided by, for every channel")

    def check(self) -> None:
        if self.randaugment is not None:
            RandAugment.parse(self.randaugment)
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError("mean and std have one number a channel, std above 0")
        if not 0 < self.scale[0] <= self.scale[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError("scale and ratio are (least, most), above 0; scale at most 1")


class ImageTransform:
    """Shared by training and evaluation: what comes in, and normalisation."""

    def __init__(self, options: AugmentOptions) -> None:
        self.options = options
        self.functional = import_torchvision()
        self.bicubic = self.functional.InterpolationMode.BICUBIC
        self.mean = torch.tensor(options.mean)[:, None, None]
        self.std = torch.tensor(options.std)[:, None, None]

    def opened(self, image: Any) -> Any:
        """Pillow's image where it has 8 bits, else a float tensor (C, H, W)."""
        if isinstance(image, np.ndarray):
            kind = np.float32 if image.dtype.kind == "f" else image.dtype.newbyteorder("=")
            image = torch.from_numpy(np.array(image, kind))
        if not isinstance(image, Tensor):
            return image
        if image.dtype == torch.uint8:
            return self.functional.to_pil_image(image)
        if not image.is_floating_point():
            raise ValueError(f"images are 8-bit or float, not {image.dtype}")
        return image.float()

    def normalised(self, image: Any) -> Tensor:
        """(C, size, size) float32."""
        if not isinstance(image, Tensor):
            image = self.functional.pil_to_tensor(image).float() / 255
        if image.shape[0] != len(self.mean):
            raise ValueError(f"images have {image.shape[0]} channels, but mean and std are for {len(self.mean)}")
        return (image - self.mean) / self.std

    def resized(self, image: Any, size: list[int]) -> Any:
        if self.extent(image) == tuple(size):
            return image
        return self.functional.resize(image, size, interpolation=self.bicubic, antialias=True)

    def extent(self, image: Any) -> tuple[int, int]:
        height, width = self.functional.get_size(image)
        return height, width


class EvalTransform(ImageTransform):
    """The short side resized to size / eval_crop, the centre cut out, normalised."""

    def __call__(self, image: Any) -> Tensor:
        image = self.opened(image)
        height, width = self.extent(image)
        if max(height, width) > MOST_ASPECT * min(height, width):  # a line of pixels would become a huge stripe
            image = self.functional.center_crop(
                image, [min(height, MOST_ASPECT * width), min(width, MOST_ASPECT * height)]
            )
            height, width = self.extent(image)
        short = math.floor(self.options.size / self.options.eval_crop)
        if min(height, width) != short:
            scale = short / min(height, width)
            image = self.resized(image, [max(short, int(height * scale)), max(short, int(width * scale))])
        return self.normalised(self.functional.center_crop(image, [self.options.size, self.options.size]))


class TrainTransform(ImageTransform):
    """Crop, mirror, RandAugment, jitter, normalise, erase."""

    def __init__(self, options: AugmentOptions) -> None:
        super().__init__(options)
        self.randaugment = RandAugment.parse(options.randaugment) if options.randaugment is not None else None

    def __call__(self, image: Any, generator: torch.Generator) -> Tensor:
        chance, options = Chance(generator), self.options
        image = self.cropped(self.opened(image), chance)
        if chance.happens(options.flip):
            image = self.functional.horizontal_flip(image)
        if self.randaugment is not None or options.jitter:
            if isinstance(image, Tensor):
                raise ValueError("RandAugment and jitter need 8-bit images, these are float: set randaugment to null")
            if self.randaugment is not None:
                bands = len(image.getbands())
                image = self.randaugment(image, chance, [round(255 * value) for value in options.mean[:bands]])
            if options.jitter:
                image = self.jittered(image, chance)
        tensor = self.normalised(image)
        return erase(tensor, generator) if chance.happens(options.erase) else tensor

    def cropped(self, image: Any, chance: Chance) -> Any:
        size = [self.options.size, self.options.size]
        if self.options.crop == "none":
            return self.resized(image, size)
        if self.options.crop == "pad":
            padded = self.functional.pad(self.resized(image, size), [4, 4, 4, 4])
            return self.functional.crop(padded, chance.below(9), chance.below(9), *size)
        box = crop_box(self.extent(image), self.options.scale, self.options.ratio, chance)
        return self.functional.resized_crop(image, *box, size, interpolation=self.bicubic, antialias=True)

    def jittered(self, image: Any, chance: Chance) -> Any:
        changes = ("adjust_brightness", "adjust_contrast", "adjust_saturation")
        for number in chance.order(len(changes)):
            factor = chance.uniform(1 - self.options.jitter, 1 + self.options.jitter)
            image = getattr(self.functional, changes[number])(image, factor)
        return image


def crop_box(
    extent: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], chance: Chance
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random part: area within `scale`, width / height within `ratio`."""
    height, width = extent
    for _ in range(TRIES):
        area = height * width * chance.uniform(*scale)
        aspect = math.exp(chance.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return chance.below(height - high + 1), chance.below(width - wide + 1), high, wide
    aspect = min(max(width / height, ratio[0]), ratio[1])  # no luck: the largest centre of a permitted shape
    wide = min(width, max(1, round(height * aspect)))
    high = min(height, max(1, round(width / aspect)))
    return (height - high) // 2, (width - wide) // 2, high, wide


def erase(image: Tensor, generator: torch.Generator) -> Tensor:
    """A box of 2 to 33 % of the normalised image (C, H, W) filled with normal noise, a draw for every pixel."""
    chance = Chance(generator)
    channels, height, width = image.shape
    for _ in range(TRIES):
        area = height * width * chance.uniform(0.02, 1 / 3)
        aspect = math.exp(chance.uniform(math.log(0.3), math.log(1 / 0.3)))
        high, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < high < height and 0 < wide < width:
            top, left = chance.below(height - high + 1), chance.below(width - wide + 1)
            image = image.clone()
            noise = torch.randn((channels, high, wide), generator=generator)
            image[:, top : top + high, left : left + wide] = noise.to(image.dtype)
            return image
    return image
