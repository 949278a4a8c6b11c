"""What DeiT does with whole batches and epochs: mixup, cutmix with soft targets, repeated augmentation."""

import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Options


class MixingOptions(Options):
    """Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019. The defaults are DeiT's."""

    mixup: float = Field(0.8, ge=0, description="mixup: both parameters of the Beta that a share is drawn from; 0: off")
    cutmix: float = Field(1.0, ge=0, description="cutmix: the same; 0: off")
    probability: float = Field(1.0, ge=0, le=1, description="of mixing a batch at all")
    switch: float = Field(0.5, ge=0, le=1, description="probability of cutmix where both are on")
    smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing of the targets")


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """(B,) class numbers -> (B, classes): smoothing / classes everywhere, the rest at the label."""
    targets = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + smoothing / classes)


def mix(
    images: Tensor, labels: Tensor, classes: int, options: MixingOptions, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mixes every image with its mirror place in the batch, the last with the first.

    images (B, C, H, W), labels (B,) -> images of the same shape, targets (B, classes). The inputs are left alone.
    """
    targets = soft_targets(labels, classes, options.smoothing)
    chosen = _choose(options, generator)
    if chosen is None:
        return images, targets
    cut, share = chosen
    if cut:
        top, bottom, left, right = _box(images.shape[-2:], share, generator)
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
    else:
        mixed = images * share + images.flip(0) * (1 - share)
    return mixed, targets * share + targets.flip(0) * (1 - share)


def _choose(options: MixingOptions, generator: torch.Generator) -> tuple[bool, float] | None:
    """(cutmix?, share of the image itself), or None for a batch that stays as it is."""
    if not (options.mixup or options.cutmix) or _uniform(generator) >= options.probability:
        return None
    cut = bool(options.cutmix) and (not options.mixup or _uniform(generator) < options.switch)
    alpha = options.cutmix if cut else options.mixup
    # torch draws Beta numbers from its global generator only; numpy's, seeded by ours, draws this one.
    seed = int(torch.randint(2**62, (), generator=generator))
    return cut, float(np.random.default_rng(seed).beta(alpha, alpha))


def _box(extent: torch.Size, share: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """A box of 1 - share of the area around a random centre, cut off at the borders: top, bottom, left, right."""
    edges = []
    for side in extent:
        half = int(side * math.sqrt(1 - share)) // 2
        centre = int(torch.randint(side, (), generator=generator))
        edges += [max(0, centre - half), min(side, centre + half)]
    return edges[0], edges[1], edges[2], edges[3]


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
