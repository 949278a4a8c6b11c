"""Mixup and CutMix with soft targets, as DeiT applies them to whole batches.

What is random is drawn where the batch is built; pixels are mixed on the device that trains.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Options


class MixingOptions(Options):
    """Mixing of images (Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019). The defaults are those of DeiT."""

    mixup: float = Field(
        0.8, ge=0, description="For mixup: both parameters of the Beta distribution of the share; 0 turns it off."
    )
    cutmix: float = Field(
        1.0, ge=0, description="For CutMix: both parameters of the Beta distribution; 0 turns it off."
    )
    probability: float = Field(1.0, ge=0, le=1, description="The probability that a batch is mixed at all.")
    switch: float = Field(0.5, ge=0, le=1, description="The probability of CutMix if both are on.")
    smoothing: float = Field(0.1, ge=0, lt=1, description="The label smoothing of the targets.")


def soft_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Targets (B, num_classes) of labels (B,): smoothing / num_classes everywhere, and the rest at the label."""
    targets = torch.full((len(labels), num_classes), smoothing / num_classes, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + smoothing / num_classes)


def draw_mixing(size: Sequence[int], options: MixingOptions, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws how a batch of images of `size` (height, width) is mixed; `mix_images` and `mix_targets` do it.

    shares: (2,) float32, those of the image itself and of the other. cut: (4,) int64, top, bottom, left and right of
    the box that CutMix pastes; without it mixup is meant. A batch that is not mixed has an empty box.
    """
    choice = _choose(options, generator)
    if choice is not None and not choice[0]:
        return {"shares": torch.tensor([choice[1], 1 - choice[1]])}
    top, bottom, left, right = (0, 0, 0, 0) if choice is None else _random_box(size, choice[1], generator)
    share = 1 - (bottom - top) * (right - left) / (size[0] * size[1])
    return {"shares": torch.tensor([share, 1 - share]), "cut": torch.tensor([top, bottom, left, right])}


def mix_images(images: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
    """Returns images (B, C, H, W) in which number i is mixed with number B - 1 - i, as was drawn.

    Mixup gives share · x_i + (1 - share) · x_j; CutMix pastes a box of x_j into x_i, and its share is the part of the
    area that is left. Nothing is read back from the device.
    """
    if "cut" in drawn:
        return torch.where(inside_boxes(drawn["cut"][None], images.shape[-2:]), images.flip(0), images)
    return (images * drawn["shares"][0]).add_(images.flip(0).mul_(drawn["shares"][1]))


def mix_targets(targets: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
    """Returns targets (B, classes) that are mixed by the shares of their images."""
    return targets * drawn["shares"][0] + targets.flip(0) * drawn["shares"][1]


def inside_boxes(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Returns bool (n, 1, height, width), True inside each box. boxes: (n, 4), top, bottom, left and right."""
    top, bottom, left, right = (edge[:, None] for edge in boxes.unbind(1))
    y, x = (torch.arange(side, device=boxes.device) for side in size)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def _choose(options: MixingOptions, generator: torch.Generator) -> tuple[bool, float] | None:
    """Returns whether to use CutMix, and the share of the image itself, or None for a batch that is not mixed."""
    if not (options.mixup or options.cutmix) or _uniform(generator) >= options.probability:
        return None
    use_cutmix = bool(options.cutmix) and (not options.mixup or _uniform(generator) < options.switch)
    alpha = options.cutmix if use_cutmix else options.mixup
    # torch draws Beta numbers only from its global generator, so a generator of numpy that ours seeds draws this one.
    seed = int(torch.randint(2**62, (), generator=generator))
    return use_cutmix, float(np.random.default_rng(seed).beta(alpha, alpha))


def _random_box(size: Sequence[int], share: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Returns top, bottom, left and right of a box of 1 - share of the area around a random centre."""
    edges = []
    for side in size:
        half = int(side * math.sqrt(1 - share)) // 2
        centre = int(torch.randint(side, (), generator=generator))
        edges += [max(0, centre - half), min(side, centre + half)]
    return edges[0], edges[1], edges[2], edges[3]


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
