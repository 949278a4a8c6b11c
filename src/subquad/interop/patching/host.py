"""The description of an attention layer of another library's model, and the module that replaces it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from subquad.kernels import tracing
from subquad.mixers import Mixer

ATTENTION_NAME = "subquad_swap"
"""What transformers calls the attention of swapped layers."""
PLAIN_MAPS = (nn.Linear, NonDynamicallyQuantizableLinear)
MASKED_LOGIT = -1e4
"""An additive mask hides a key with this number or less; it still fits into float16."""


class Refusal(ValueError):  # noqa: N818 - it is an answer, not a fault
    """Says why a layer cannot be swapped."""


class SwappedAttention(nn.Module):
    """A mixer in place of an attention layer. Subclasses have the interface of the layer that they replace."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer


@dataclass(frozen=True)
class Host:
    """A self-attention layer of another library's model.

    tensors: weights and biases of the maps q, k and v, (heads * head_width, dim), and out, (dim, heads * head_width),
    with names such as "q.weight", scaled so that the logits are q.k / sqrt(head_width).
    """

    dim: int
    heads: int
    head_width: int
    tensors: dict[str, Tensor]
    wrap: Callable[[Mixer], SwappedAttention]
    attention: str = ""
    """The path, inside the layer, of the module that the mixer replaces; "" is the layer itself."""
    to_identity: tuple[str, ...] = ()
    """The paths of modules that become identities, because the mixer does their work too."""
    causal: bool | None = False
    """None: the layer itself does not say; whoever swaps it does."""
    attention_dropout: float = 0.0
    dropout: float = 0.0
    """Dropout after the output map."""
    config: Any = None
    """The config whose `use_cache` decides whether a causal layer gets a cache."""
    keeps_maps: bool = False
    """Whether a mixer with queries, keys and values works between the layer's own maps, which stay where they are."""
    distance_bias: Callable[[Tensor], Tensor] | None = None
    """What the layer adds to its logits, (heads, queries, keys), by distances from query to key, (queries, keys)."""
    makes_bias_for: tuple[nn.Module, ...] = ()
    """The layers that use the biases which this one computes, itself among them."""


Adapter = Callable[[nn.Module, Sequence[nn.Module]], Host]
"""Describes a layer, given also the modules that contain it, the whole model first. It may raise Refusal."""


def linear_tensors(name: str, layer: nn.Module, path: str) -> dict[str, Tensor]:
    """Returns weight and bias of the linear map at `path`, as `name`.weight and `name`.bias."""
    found: Any = getattr(layer, path, None)
    if type(found) not in PLAIN_MAPS:  # another subclass may hold quantised weights or an adapter
        what = "missing" if found is None else f"a {type(found).__name__}"
        raise Refusal(f"its map {path} should be a plain linear map, but it is {what}")
    tensors = {f"{name}.weight": found.weight.detach()}
    return tensors if found.bias is None else tensors | {f"{name}.bias": found.bias.detach()}


def split_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits the tensors of one map [q | k | v], named "qkv.weight" and "qkv.bias", into those of three maps."""
    return {
        f"{part}.{name.removeprefix('qkv.')}": rows
        for name, tensor in tensors.items()
        for part, rows in zip("qkv", tensor.chunk(3), strict=True)
    }


def mask_to_padding(mask: Tensor | None, batch: int, time: int, causal: bool) -> Tensor | None:
    """Returns the padding (batch, time) bool, True = ignore, of `time` tokens that an attention mask means.

    mask: (batch, keys), nonzero = keep; or (batch or 1, heads or 1, queries, keys), where True or 0.0 lets a query see
    a key and False or a very negative number hides it. The last keys are these tokens. A mask that says more than
    padding and causal order is refused, except in compiled code, which must not read values.
    """
    if mask is None:
        return None
    if mask.dim() == 4:
        allowed = mask if mask.dtype == torch.bool else mask == 0
        tokens = allowed[:, 0, -1]  # the last query sees every token that is not padding
        if tracing.may_read_values(mask):
            _check_mask(mask, allowed, tokens, causal)
    elif mask.dim() == 2:
        tokens = mask != 0
    else:
        raise ValueError(
            f"a mixer in the place of attention needs a mask of 2 or 4 dimensions, got {tuple(mask.shape)}"
        )
    return tokens[:, -time:].logical_not().expand(batch, -1)


def _check_mask(mask: Tensor, allowed: Tensor, tokens: Tensor, causal: bool) -> None:
    if not causal and mask.shape[1] == 1 and mask.stride(2) == 0 and mask.dtype == torch.bool:
        return  # the mask is one row that is expanded for all queries
    expected = tokens[:, None, None, :]
    if causal:
        queries, keys = mask.shape[-2:]
        ones = torch.ones(queries, keys, dtype=torch.bool, device=mask.device)
        expected = expected & ones.tril(keys - queries)
    if not torch.equal(allowed, expected.expand_as(allowed)):
        order = " and the causal order" if causal else ""
        raise ValueError(
            f"a mixer in the place of attention can follow only masks of padding{order}, but this mask says more"
        )
    if mask.dtype != torch.bool and not (allowed | (mask <= MASKED_LOGIT)).all():
        raise ValueError(
            "a mixer in the place of attention cannot add biases to its logits, but the mask has other numbers than 0 "
            "and -inf"
        )
