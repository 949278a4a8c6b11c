"""Mixup and CutMix with soft targets, as DeiT applies them to whole batches."""

import math

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


def mix_batch(
    images: Tensor, labels: Tensor, num_classes: int, options: MixingOptions, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mixes image i of the batch with image B - 1 - i. Returns new images and soft targets (B, num_classes).

    images: (B, C, H, W), labels: (B,). Mixup gives share · x_i + (1 - share) · x_j; CutMix pastes a box of x_j into
    x_i, and its share is the part of the area that is left. The targets are mixed by the same share.
    """
    targets = soft_targets(labels, num_classes, options.smoothing)
    choice = _choose(options, generator)
    if choice is None:
        return images, targets
    use_cutmix, share = choice
    if use_cutmix:
        top, bottom, left, right = _random_box(images.shape[-2:], share, generator)
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
    else:
        mixed = images * share + images.flip(0) * (1 - share)
    return mixed, targets * share + targets.flip(0) * (1 - share)


def _choose(options: MixingOptions, generator: torch.Generator) -> tuple[bool, float] | None:
    """Returns whether to use CutMix, and the share of the image itself, or None for a batch that is not mixed."""
    if not (options.mixup or options.cutmix) or _uniform(generator) >= options.probability:
        return None
    use_cutmix = bool(options.cutmix) and (not options.mixup or _uniform(generator) < options.switch)
    alpha = options.cutmix if use_cutmix else options.mixup
    # torch draws Beta numbers only from its global generator, so a generator of numpy that ours seeds draws this one.
    seed = int(torch.randint(2**62, (), generator=generator))
    return use_cutmix, float(np.random.default_rng(seed).beta(alpha, alpha))


def _random_box(size: torch.Size, share: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Returns top, bottom, left and right of a box of 1 - share of the area around a random centre."""
    edges = []
    for side in size:
        half = int(side * math.sqrt(1 - share)) // 2
        centre = int(torch.randint(side, (), generator=generator))
        edges += [max(0, centre - half), min(side, centre + half)]
    return edges[0], edges[1], edges[2], edges[3]


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
