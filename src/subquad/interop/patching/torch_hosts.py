"""The attention of torch itself: nn.MultiheadAttention, alone and in nn.TransformerEncoderLayer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.interop.patching.host import (
    MASKED_LOGIT,
    Adapter,
    Host,
    Refusal,
    SwappedAttention,
    linear_tensors,
    mask_to_padding,
    split_fused,
)
from subquad.mixers import Mixer


class TorchAttention(SwappedAttention):
    """A mixer with the interface of nn.MultiheadAttention. It returns no attention weights."""

    in_proj_bias = None
    """What makes nn.TransformerEncoderLayer call this module, and not its own kernel with the weights of attention."""

    def __init__(self, mixer: Mixer, batch_first: bool) -> None:
        super().__init__(mixer)
        self.batch_first = batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: ARG002
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002
        is_causal: bool = False,  # noqa: ARG002 - it repeats what the mask says
    ) -> tuple[Tensor, None]:
        if query is not key or key is not value:
            raise ValueError("a swapped layer reads one sequence, but its keys or values are another one")
        if query.is_nested or query.dim() != 3:
            raise ValueError(
                "a swapped layer reads a padded batch of sequences, and not a nested tensor or one sequence"
            )
        x = query if self.batch_first else query.transpose(0, 1)
        self._check_order(attn_mask, x.shape[0])
        y = self.mixer(x, padding=_padding(key_padding_mask)).y
        return y if self.batch_first else y.transpose(0, 1), None

    def _check_order(self, mask: Tensor | None, batch: int) -> None:
        """Refuses a mask (time, time) or (batch * heads, time, time) other than that of the mixer's direction."""
        causal = self.mixer.config.causal
        if mask is None:
            if causal:
                raise ValueError("a layer that was swapped with causal=True needs the causal mask that says so")
            return
        allowed = mask.logical_not() if mask.dtype == torch.bool else mask
        pairs = allowed[None, None] if mask.dim() == 2 else allowed.unflatten(0, (batch, -1))
        mask_to_padding(pairs, batch, mask.shape[-1], causal)


def _padding(mask: Tensor | None) -> Tensor | None:
    """Padding, True = ignore, of a mask (batch, time): True, or a very negative number, hides a key."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask <= MASKED_LOGIT


def multihead_attention(layer: Any, _: Sequence[nn.Module]) -> Host:
    if not layer._qkv_same_embed_dim:
        raise Refusal("its keys or values have another width than its queries")
    if layer.bias_k is not None or layer.add_zero_attn:
        raise Refusal("it adds a key to the sequence (add_bias_kv or add_zero_attn), which no mixer does")
    fused = {"qkv.weight": layer.in_proj_weight.detach()}
    if layer.in_proj_bias is not None:
        fused["qkv.bias"] = layer.in_proj_bias.detach()
    return Host(
        dim=layer.embed_dim,
        heads=layer.num_heads,
        head_width=layer.head_dim,
        tensors=split_fused(fused) | linear_tensors("out", layer, "out_proj"),
        wrap=partial(TorchAttention, batch_first=layer.batch_first),
        causal=None,
        attention_dropout=layer.dropout,
    )


ADAPTERS: dict[str, Adapter] = {"torch.nn.modules.activation.MultiheadAttention": multihead_attention}
