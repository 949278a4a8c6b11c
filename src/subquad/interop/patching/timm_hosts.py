"""The attention of timm's VisionTransformer, including distilled DeiT."""

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
    mask_to_padding,
    split_fused,
)
from subquad.mixers import Mixer


class TimmAttention(SwappedAttention):
    """A mixer with the interface of timm's attention."""

    def __init__(self, mixer: Mixer, grid: tuple[int, int] | None) -> None:
        super().__init__(mixer)
        self.grid = grid

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise ValueError("a swapped layer that is not causal was called with is_causal=True; undo the swap")
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask[None, None]  # queries and keys
        return self.mixer(x, padding=mask_to_padding(attn_mask, x.shape[0], x.shape[1], causal=False), grid=self.grid).y


def timm_attention(layer: Any, parents: Sequence[nn.Module]) -> Host:
    for part, what in {"q_norm": "normalised queries", "k_norm": "normalised keys", "norm": "a norm"}.items():
        if not isinstance(getattr(layer, part, None), nn.Identity | None):
            raise Refusal(f"it has {what}, which no mixer has")
    if getattr(layer, "gate", None) is not None:
        raise Refusal("it has a gate on its output, which no mixer has")
    tensors = split_fused(linear_tensors("qkv", layer, "qkv")) | linear_tensors("out", layer, "proj")
    dim = tensors["q.weight"].shape[1]
    if tensors["out.weight"].shape[0] != dim:
        raise Refusal(f"it maps {dim} channels to {tensors['out.weight'].shape[0]}")
    return Host(
        dim=dim,
        heads=layer.num_heads,
        head_width=layer.head_dim,
        tensors=tensors,
        wrap=partial(TimmAttention, grid=_grid(parents)),
        attention_dropout=layer.attn_drop.p,
        dropout=layer.proj_drop.p,
    )


def _grid(parents: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Returns the grid of patches, or None if there are other tokens or the size of images may change."""
    model: Any = next((module for module in reversed(parents) if hasattr(module, "patch_embed")), None)
    if getattr(model, "num_prefix_tokens", None) != 0 or getattr(model, "dynamic_img_size", True):
        return None
    if not isinstance(getattr(model, "patch_drop", None), nn.Identity):
        return None
    height, width = model.patch_embed.grid_size
    return height, width


ADAPTERS: dict[str, Adapter] = {"timm.layers.attention.Attention": timm_attention}
