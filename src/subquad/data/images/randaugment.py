"""RandAugment as DeiT uses it (`rand-m9-mstd0.5-inc1`): a few random operations on an 8-bit image.

Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2020. The strength of an
operation is drawn around m, which is 0 to 10; `inc1` means that every operation changes the image more as m grows.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subquad.packages import require

MAX_STRENGTH = 10.0
Operation = Callable[[Any, float, "Random", list[float]], Any]
"""A function of an image, a strength of 0 to 1, the random generator, and the colour of new pixels."""


class Random:
    """Random numbers of several kinds, all from the caller's generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def normal(self, mean: float, deviation: float) -> float:
        return mean + deviation * float(torch.randn((), generator=self.generator, dtype=torch.float64))

    def below(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.generator))

    def happens(self, probability: float) -> bool:
        return self.uniform() < probability

    def random_sign(self, value: float) -> float:
        return value if self.happens(0.5) else -value

    def permutation(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()


def _pillow(module: str) -> Any:
    return require(f"PIL.{module}", "RandAugment", "vision", package="Pillow")


def _colour(fill: list[float]) -> Any:
    """Returns a colour as Pillow has it: a number if there is one channel, else a tuple."""
    return tuple(map(int, fill)) if len(fill) > 1 else int(fill[0])


def _rotate(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:
    bicubic = _pillow("Image").Resampling.BICUBIC
    return image.rotate(-rng.random_sign(30 * strength), bicubic, fillcolor=_colour(fill))


def _shear(axis: int) -> Operation:
    def shear(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:
        pillow, slope = _pillow("Image"), rng.random_sign(0.3 * strength)
        # (x, y) of the result shows (x + slope · y, y) or (x, y + slope · x) of the image
        matrix = (1, slope, 0, 0, 1, 0) if axis == 0 else (1, 0, 0, slope, 1, 0)
        return image.transform(
            image.size, pillow.Transform.AFFINE, matrix, pillow.Resampling.BICUBIC, fillcolor=_colour(fill)
        )

    return shear


def _translate(axis: int) -> Operation:
    def translate(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:
        pixels = [0, 0]
        pixels[axis] = round(rng.random_sign(0.45 * strength) * image.size[axis])
        moved = _pillow("Image").new(image.mode, image.size, _colour(fill))
        moved.paste(image, tuple(pixels))
        return moved

    return translate


def _enhance(name: str) -> Operation:
    """Returns a change of Pillow's ImageEnhance. A factor of 1 leaves the image as it is."""

    def enhance(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:  # noqa: ARG001
        factor = max(0.1, 1 + rng.random_sign(0.9 * strength))
        return getattr(_pillow("ImageEnhance"), name)(image).enhance(factor)

    return enhance


def _without_strength(name: str) -> Operation:
    def apply(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:  # noqa: ARG001
        return getattr(_pillow("ImageOps"), name)(image)

    return apply


def _posterize(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:  # noqa: ARG001
    return _pillow("ImageOps").posterize(image, max(1, 4 - int(4 * strength)))


def _solarize(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:  # noqa: ARG001
    return _pillow("ImageOps").solarize(image, 256 - int(256 * strength))


def _solarize_add(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:  # noqa: ARG001
    """Makes dark pixels brighter."""
    table = [min(255, value + int(110 * strength)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


OPERATIONS: dict[str, Operation] = {
    "autocontrast": _without_strength("autocontrast"),
    "equalize": _without_strength("equalize"),
    "invert": _without_strength("invert"),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "colour": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "brightness": _enhance("Brightness"),
    "sharpness": _enhance("Sharpness"),
    "shear_x": _shear(0),
    "shear_y": _shear(1),
    "translate_x": _translate(0),
    "translate_y": _translate(1),
}


@dataclass(frozen=True)
class RandAugment:
    """Chooses `operations` of the list above, each applied with probability 1/2 and a strength around `magnitude`."""

    magnitude: float = 9.0
    deviation: float = 0.5
    operations: int = 2

    @classmethod
    def parse(cls, text: str) -> "RandAugment":
        """Parses the notation of timm, such as rand-m9-mstd0.5-inc1-n2; n is the number of operations."""
        name, *parts = text.split("-")
        values = {"m": 9.0, "mstd": 0.0, "inc": 0.0, "n": 2.0}
        for part in parts:
            found = re.fullmatch(r"(mstd|m|inc|n)(\d+(?:\.\d+)?)", part)
            if found is None:
                raise ValueError(f"{text!r}: {part!r} is not understood; write it like rand-m9-mstd0.5-inc1")
            values[found[1]] = float(found[2])
        if name != "rand" or values["inc"] != 1 or not 0 <= values["m"] <= MAX_STRENGTH:
            raise ValueError(f"{text!r} is not known here: write it like rand-m9-mstd0.5-inc1, with m from 0 to 10")
        return cls(values["m"], values["mstd"], int(values["n"]))

    def __call__(self, image: Any, rng: Random, fill: list[float]) -> Any:
        """image: an 8-bit image of Pillow; fill: the colour of new pixels, 0 to 255 for each channel."""
        names = list(OPERATIONS)
        for _ in range(self.operations):
            operation = OPERATIONS[names[rng.below(len(names))]]
            if rng.happens(0.5):
                strength = min(max(rng.normal(self.magnitude, self.deviation), 0.0), MAX_STRENGTH) / MAX_STRENGTH
                image = operation(image, strength, rng, fill)
        return image
