"""Pyramid vision transformer (PVTv2): four stages on coarser and coarser grids, each with its own width and mechanism.

A mechanism mixes all tokens of its stage. As in the originals, the last stage of the presets has softmax attention.

Citation: Wang et al., "PVT v2: improved baselines with pyramid vision transformer", 2022.
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.models.base import (
    Model,
    ModelConfig,
    ModelOutput,
    init_as_vision,
    mean_aux,
    modules_outside_mixers,
    register_model,
)
from subquad.models.vision import random_images
from subquad.nn.block import BlockInputs
from subquad.nn.patches import OverlappingPatches
from subquad.nn.stack import Stack, StackConfig, drop_path_rates

NATIVE_SIDE = 224
FINEST_PATCH = 4
"""The distance in pixels between cells of the finest grid."""


class PyramidConfig(ModelConfig):
    kind: Literal["pyramid"] = "pyramid"
    channels: int = Field(3, ge=1, description="The number of channels of the images.")
    num_classes: int = Field(1000, ge=1, description="The number of classes.")
    stages: tuple[StackConfig, ...] = Field(
        min_length=1, description="The stacks, from the finest grid to the coarsest."
    )
    drop_path: float = Field(
        0.0, ge=0.0, lt=1.0, description="The drop-path rate of the last block. It rises from 0 over all stages."
    )

    ignored_data_options: ClassVar = frozenset({"image_size"})

    def check(self) -> None:
        for number, stage in enumerate(self.stages):
            if stage.causal or stage.cross is not None:
                raise ValueError(f"stages.{number}: an image has no order to be causal in, and no context")


@register_model
class Pyramid(Model):
    """Maps images (batch, channels, H, W) to logits (batch, num_classes)."""

    Config = PyramidConfig
    config: PyramidConfig
    has_one_stack = False

    def __init__(self, config: PyramidConfig) -> None:
        super().__init__(config)
        widths = [config.channels, *(stage.dim for stage in config.stages)]
        # the first stage has 7 x 7 kernels with stride 4, the others 3 x 3 kernels with stride 2
        self.patches = nn.ModuleList(
            OverlappingPatches(widths[number], widths[number + 1], 3 if number else 7, 2 if number else FINEST_PATCH)
            for number in range(len(config.stages))
        )
        rates = iter(drop_path_rates(config.drop_path, sum(stage.layers for stage in config.stages)))
        self.stages = nn.ModuleList(Stack(stage, [next(rates) for _ in range(stage.layers)]) for stage in config.stages)
        self.head = nn.Linear(widths[-1], config.num_classes)
        init_as_vision(self)
        for module in modules_outside_mixers(self):
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def parts(self) -> dict[str, nn.Module]:
        pairs = zip(self.patches, self.stages, strict=True)
        stages = {f"stage {number}": nn.ModuleList(pair) for number, pair in enumerate(pairs, 1)}
        return stages | {"head": self.head}

    @property
    def input_stack(self) -> Stack:
        stack = self.stages[0]
        assert isinstance(stack, Stack)
        return stack

    @classmethod
    def possible_length(cls, length: int) -> int:
        """Images are square, so the finest grid has a square number of cells."""
        return max(1, math.isqrt(length)) ** 2

    @property
    def native_length(self) -> int | None:
        """The length of ImageNet's images. Others are possible too."""
        return (NATIVE_SIDE // FINEST_PATCH) ** 2

    def grid(self, length: int) -> tuple[int, int] | None:
        return (math.isqrt(length),) * 2

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        return (random_images(self.config.channels, math.isqrt(length) * FINEST_PATCH, batch, generator),)

    def forward(self, images: Tensor) -> ModelOutput:
        regularisers = []
        for patches, stage in zip(self.patches, self.stages, strict=True):
            x, grid = patches(images)
            x, _, aux = stage(x, BlockInputs(grid=grid))
            regularisers.append(aux)
            images = x.transpose(1, 2).unflatten(2, grid)
        return ModelOutput(self.head(x.mean(1)), None, mean_aux(*regularisers))
