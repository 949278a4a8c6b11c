"""Vision transformer: patches as tokens of a grid, learned positions, one stack, and a head on the mean of all tokens.

With a class token (DeiT) the tokens are a sequence: the class token, then the patches row by row. The head then reads
the class token.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.models.base import Model, ModelConfig, ModelOutput, init_as_vision, mean_aux, register_model
from subquad.nn.block import BlockInputs
from subquad.nn.patches import PatchEmbedding, Stem
from subquad.nn.stack import Stack, StackConfig


class VisionConfig(ModelConfig):
    kind: Literal["vision"] = "vision"
    image_size: int = Field(224, ge=1, description="The side of the images in pixels.")
    channels: int = Field(3, ge=1, description="The number of channels of the images.")
    num_classes: int = Field(1000, ge=1, description="The number of classes.")
    patch_size: int = Field(16, ge=1, description="The side of a patch in pixels.")
    stem: Stem = Field("patch", description="How patches become tokens: one linear map, hMLP, or convolutions.")
    positions: bool = Field(True, description="Whether each cell of the grid has a learned position.")
    class_token: bool = Field(
        False, description="Whether a class token is classified instead of the mean of all tokens."
    )
    dim: int = Field(192, ge=1, description="The width of the model.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="The dropout rate of the embedded patches.")
    encoder: StackConfig = Field(description="The stack of blocks.")

    stacks: ClassVar = {"encoder": {"causal": False, "cross": None}}

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size

    def check(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"patches of {self.patch_size} pixels do not divide images of {self.image_size}")
        if self.encoder.ffn_conv and self.class_token:
            raise ValueError("ffn_conv needs a grid; with class_token the tokens are a sequence")


@register_model
class VisionTransformer(Model):
    """Maps images (batch, channels, H, W) to logits (batch, num_classes)."""

    Config = VisionConfig
    config: VisionConfig

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.patches = PatchEmbedding(config.channels, config.dim, config.patch_size, config.stem)
        places = config.side**2 + config.class_token
        self.positions = nn.Parameter(torch.empty(places, config.dim)) if config.positions else None
        self.class_token = nn.Parameter(torch.empty(config.dim)) if config.class_token else None
        self.drop = nn.Dropout(config.dropout)
        self.encoder = Stack(config.encoder)
        self.head = nn.Linear(config.dim, config.num_classes)
        init_as_vision(self)
        for table in (self.positions, self.class_token):
            if table is not None:
                nn.init.trunc_normal_(table, std=0.02)

    @property
    def input_stack(self) -> Stack:
        return self.encoder

    @classmethod
    def possible_length(cls, length: int) -> int:
        """Images are square, so lengths are square numbers."""
        return max(1, math.isqrt(length)) ** 2

    @classmethod
    def config_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        patch_size = options.get("patch_size", VisionConfig.model_fields["patch_size"].default)
        return {**options, "image_size": math.isqrt(length) * patch_size}

    @property
    def native_length(self) -> int | None:
        return self.config.side**2

    def grid(self, length: int) -> tuple[int, int] | None:
        """With a class token the tokens are a sequence."""
        return None if self.config.class_token else (math.isqrt(length),) * 2

    def stack_length(self, length: int) -> int:
        return length + self.config.class_token

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        return (random_images(self.config.channels, math.isqrt(length) * self.config.patch_size, batch, generator),)

    def forward(self, images: Tensor) -> ModelOutput:
        x, place = self.patches(images)
        grid: tuple[int, int] | None = place
        if self.class_token is not None:
            x, grid = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], 1), None
        if self.positions is not None:
            if place != (self.config.side, self.config.side):
                wanted, given = self.config.image_size, tuple(images.shape[-2:])
                raise ValueError(f"this model has positions for images of {wanted} x {wanted} pixels, got {given}")
            x = x + self.positions
        x, _, aux = self.encoder(self.drop(x), BlockInputs(grid=grid))
        pooled = x[:, 0] if self.class_token is not None else x.mean(1)
        return ModelOutput(self.head(pooled), None, mean_aux(aux))


def random_images(channels: int, side: int, batch: int, generator: torch.Generator | None) -> Tensor:
    """Returns random images (batch, channels, side, side)."""
    device = generator.device if generator else None
    return torch.randn(batch, channels, side, side, generator=generator, device=device)
