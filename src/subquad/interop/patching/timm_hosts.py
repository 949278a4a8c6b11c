"""Attention of timm's VisionTransformer, distilled DeiT included."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from subquad.interop.patching.host import (
    Adapter,
    Host,
    Refusal,
    SwappedAttention,
    linear_tensors,
    padding_of,
    split_fused,
)
from subquad.mixers import Mixer


class TimmAttention(SwappedAttention):
    """Called as timm calls its attention."""

    def __init__(self, mixer: Mixer, grid: tuple[int, int] | None) -> None:
        super().__init__(mixer)
        self.grid = grid

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise ValueError("is_causal=True was asked of a swapped layer that looks both ways; undo the swap")
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask[None, None]  # queries and keys
        return self.mixer(x, padding=padding_of(attn_mask, x, causal=False), grid=self.grid).y


def timm_attention(layer: Any, around: Sequence[nn.Module]) -> Host:
    for part, what in {"q_norm": "normalised queries", "k_norm": "normalised keys", "norm": "a norm"}.items():
        if not isinstance(getattr(layer, part, None), nn.Identity | None):
            raise Refusal(f"it has {what}, which no mixer has")
    if getattr(layer, "gate", None) is not None:
        raise Refusal("it gates its output, which no mixer does")
    tensors = split_fused(linear_tensors("qkv", layer, "qkv")) | linear_tensors("out", layer, "proj")
    dim = tensors["q.weight"].shape[1]
    if tensors["out.weight"].shape[0] != dim:
        raise Refusal(f"it maps {dim} channels to {tensors['out.weight'].shape[0]}")
    return Host(
        dim=dim,
        heads=layer.num_heads,
        head_width=layer.head_dim,
        tensors=tensors,
        wrap=partial(TimmAttention, grid=_grid(around)),
        attention_dropout=layer.attn_drop.p,
        dropout=layer.proj_drop.p,
    )


def _grid(around: Sequence[nn.Module]) -> tuple[int, int] | None:
    """The grid of patches if a layer's tokens are just that: no class token or register, one size for all images."""
    model: Any = next((module for module in reversed(around) if hasattr(module, "patch_embed")), None)
    if getattr(model, "num_prefix_tokens", None) != 0 or getattr(model, "dynamic_img_size", True):
        return None
    if not isinstance(getattr(model, "patch_drop", None), nn.Identity):
        return None
    height, width = model.patch_embed.grid_size
    return height, width


ADAPTERS: dict[str, Adapter] = {"timm.layers.attention.Attention": timm_attention}
