"""RandAugment as DeiT uses it (`rand-m9-mstd0.5-inc1`): a few operations of a random strength on an 8-bit image.

Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2020. The strength m of
0 to 10 is drawn around the one given; `inc1` means that every operation changes more as m grows.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subquad.data.images.torchvision import import_torchvision

STRONGEST = 10.0
Operation = Callable[[Any, float, "Chance", list[float]], Any]  # image, strength 0 to 1, draws, colour of new pixels


class Chance:
    """Numbers from the caller's generator."""

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

    def signed(self, value: float) -> float:
        return value if self.happens(0.5) else -value

    def order(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()


def _affine(image: Any, fill: list[float], angle: float = 0.0, **changes: Any) -> Any:
    functional = import_torchvision()
    options: dict[str, Any] = {"translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], **changes}
    return functional.affine(image, angle, interpolation=functional.InterpolationMode.BICUBIC, fill=fill, **options)


def _rotate(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:
    return _affine(image, fill, angle=chance.signed(30 * strength))


def _shear(axis: int) -> Operation:
    def shear(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:
        degrees = [0.0, 0.0]
        degrees[axis] = math.degrees(math.atan(chance.signed(0.3 * strength)))
        return _affine(image, fill, shear=degrees, center=[0.0, 0.0])

    return shear


def _translate(axis: int) -> Operation:
    def translate(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:
        pixels = [0, 0]
        pixels[axis] = round(chance.signed(0.45 * strength) * image.size[axis])
        return _affine(image, fill, translate=pixels)

    return translate


def _enhance(name: str) -> Operation:
    """adjust_<name> of torchvision: 1 leaves the image, away from 1 changes it."""

    def enhance(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:  # noqa: ARG001
        factor = max(0.1, 1 + chance.signed(0.9 * strength))
        return getattr(import_torchvision(), f"adjust_{name}")(image, factor)

    return enhance


def _fixed(name: str) -> Operation:
    def apply(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:  # noqa: ARG001
        return getattr(import_torchvision(), name)(image)

    return apply


def _posterize(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:  # noqa: ARG001
    return import_torchvision().posterize(image, bits=max(1, 4 - int(4 * strength)))


def _solarize(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:  # noqa: ARG001
    return import_torchvision().solarize(image, threshold=256 - int(256 * strength))


def _solarize_add(image: Any, strength: float, chance: Chance, fill: list[float]) -> Any:  # noqa: ARG001
    """Dark pixels become brighter."""
    table = [min(255, value + int(110 * strength)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


OPERATIONS: dict[str, Operation] = {
    "autocontrast": _fixed("autocontrast"),
    "equalize": _fixed("equalize"),
    "invert": _fixed("invert"),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "colour": _enhance("saturation"),
    "contrast": _enhance("contrast"),
    "brightness": _enhance("brightness"),
    "sharpness": _enhance("sharpness"),
    "shear_x": _shear(0),
    "shear_y": _shear(1),
    "translate_x": _translate(0),
    "translate_y": _translate(1),
}


@dataclass(frozen=True)
class RandAugment:
    """`operations` of the list above, each applied with probability 1/2, at a strength drawn around `magnitude`."""

    magnitude: float = 9.0
    deviation: float = 0.5
    operations: int = 2

    @classmethod
    def parse(cls, text: str) -> "RandAugment":
        """timm's way of writing it: rand-m9-mstd0.5-inc1, n for the number of operations."""
        name, *parts = text.split("-")
        values = {"m": 9.0, "mstd": 0.0, "inc": 0.0, "n": 2.0}
        for part in parts:
            found = re.fullmatch(r"(mstd|m|inc|n)(\d+(?:\.\d+)?)", part)
            if found is None:
                raise ValueError(f"{text!r}: {part!r} is not understood; write it like rand-m9-mstd0.5-inc1")
            values[found[1]] = float(found[2])
        if name != "rand" or values["inc"] != 1 or not 0 <= values["m"] <= STRONGEST:
            raise ValueError(f"{text!r} is not known here: write it like rand-m9-mstd0.5-inc1, with m from 0 to 10")
        return cls(values["m"], values["mstd"], int(values["n"]))

    def __call__(self, image: Any, chance: Chance, fill: list[float]) -> Any:
        """image: Pillow's, 8 bits; fill: colour of pixels that come into view, 0 to 255."""
        names = list(OPERATIONS)
        for _ in range(self.operations):
            operation = OPERATIONS[names[chance.below(len(names))]]
            if chance.happens(0.5):
                strength = min(max(chance.normal(self.magnitude, self.deviation), 0.0), STRONGEST) / STRONGEST
                image = operation(image, strength, chance, fill)
        return image
