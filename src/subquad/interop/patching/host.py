"""What surgery has to know of an attention layer of another library's model, and what stands in its place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels import tracing
from subquad.mixers import Mixer

NEVER_SEEN = -1e4
"""Additive masks hide a key with this or less; float16 ends soon below it."""


class Refusal(ValueError):  # noqa: N818 - it is an answer, not a fault
    """Why one layer stays as it is."""


class SwappedAttention(nn.Module):
    """A mixer where a host's attention was; subclasses speak the host's language."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer


@dataclass(frozen=True)
class Host:
    """A self-attention layer.

    tensors: weights and biases of the maps q, k and v, (heads * head_width, dim), and out, (dim, heads * head_width),
    under names such as "q.weight", scaled so that logits are q.k / sqrt(head_width).
    """

    dim: int
    heads: int
    head_width: int
    tensors: dict[str, Tensor]
    wrap: Callable[[Mixer], SwappedAttention]
    attention: str = ""
    """Path, from the layer, of the module that the mixer replaces; "" is the layer itself."""
    emptied: tuple[str, ...] = ()
    """Paths of modules whose work the mixer does as well: they become identities."""
    causal: bool = False
    attention_dropout: float = 0.0
    dropout: float = 0.0
    """After the output map."""
    config: Any = None
    """Its `use_cache` decides whether a causal layer is given a cache."""


Adapter = Callable[[nn.Module, Sequence[nn.Module]], Host]
"""From a layer and the modules that contain it, the whole model first. Raises Refusal."""


def linear_tensors(name: str, layer: nn.Module, path: str) -> dict[str, Tensor]:
    """Weight and bias of the linear map at `path`, under `name`."""
    found = getattr(layer, path, None)
    if type(found) is not nn.Linear:  # a subclass may hold something else (quantised weights, an adapter beside them)
        what = "missing" if found is None else f"a {type(found).__name__}"
        raise Refusal(f"its map {path} should be a plain linear map, but is {what}")
    tensors = {f"{name}.weight": found.weight.detach()}
    return tensors if found.bias is None else tensors | {f"{name}.bias": found.bias.detach()}


def split_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one map [q | k | v], named "qkv.weight" and "qkv.bias", as those of three."""
    return {
        f"{part}.{name.removeprefix('qkv.')}": rows
        for name, tensor in tensors.items()
        for part, rows in zip("qkv", tensor.chunk(3), strict=True)
    }


def padding_of(mask: Tensor | None, x: Tensor, causal: bool) -> Tensor | None:
    """Padding (batch, time) bool of x (batch, time, channels), True = ignore, from the mask of a host's attention.

    mask: (batch, keys), nonzero at tokens; or (batch or 1, heads or 1, queries, keys), True or 0.0 where a query may
    see a key, False or a very negative number where not. Keys end with those of x. A mask that says more than padding,
    and the order of a causal layer, is refused; compiled code does not look, since that would read values.
    """
    if mask is None:
        return None
    if mask.dim() == 4:
        allowed = mask if mask.dtype == torch.bool else mask == 0
        tokens = allowed[:, 0, -1]  # the last query sees every token
        if tracing.may_read_values(mask):
            _check_mask(mask, allowed, tokens, causal)
    elif mask.dim() == 2:
        tokens = mask != 0
    else:
        raise ValueError(f"a swapped layer reads masks of 2 or 4 axes, got {tuple(mask.shape)}")
    return tokens[:, -x.shape[1] :].logical_not().expand(x.shape[0], -1)


def _check_mask(mask: Tensor, allowed: Tensor, tokens: Tensor, causal: bool) -> None:
    if not causal and mask.shape[1] == 1 and mask.stride(2) == 0 and mask.dtype == torch.bool:
        return  # one row for all queries, by construction
    expected = tokens[:, None, None, :]
    if causal:
        queries, keys = mask.shape[-2:]
        ones = torch.ones(queries, keys, dtype=torch.bool, device=mask.device)
        expected = expected & ones.tril(keys - queries)
    if not torch.equal(allowed, expected.expand_as(allowed)):
        order = " and the causal order" if causal else ""
        raise ValueError(f"a swapped layer can follow masks of padding{order} only; this one says more. Undo the swap")
    if mask.dtype != torch.bool and not (allowed | (mask <= NEVER_SEEN)).all():
        raise ValueError(
            "a swapped layer cannot add biases to its logits; the mask holds other numbers than 0 and -inf"
        )
