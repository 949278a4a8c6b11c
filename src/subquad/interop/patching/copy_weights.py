"""Builds the mixer that replaces an attention layer, and copies the trained weights that the mixer has a place for."""

from typing import NamedTuple

import torch
from torch import nn

from subquad.interop.checkpoints.weight_map import WeightMap, map_stacked
from subquad.interop.patching.host import Host, Refusal
from subquad.mixers import Mixer, build, mixer_class

SAME_ROLE = {"qkv": "q k v", "qk": "q k", "in_proj": "v", "out": "out", "out_proj": "out"}
"""The linear maps of mixers by name, and the maps of attention with the same role, from the first row on.

The input map of a convolution makes the values that it mixes. If it is gated, its later rows are the gates.
"""


class CopiedWeights(NamedTuple):
    """What happened to the tensors, by name.

    kept: tensors of the host that were copied. new: tensors of the mixer that are freshly initialised, or their rows
    from the first new one on. dropped: tensors of the host that the mixer has no place for.
    """

    kept: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


def build_replacement(host: Host, name: str, options: dict[str, object]) -> Mixer:
    """Builds a mixer with the width and heads of the host, and its biases and dropout if the mechanism has them."""
    kind = mixer_class(name)
    fields = kind.Config.model_fields
    own: dict[str, object] = {
        "attention_dropout": host.attention_dropout,
        "dropout": host.dropout,
        "qkv_bias": "q.bias" in host.tensors,
        "qk_bias": "q.bias" in host.tensors,
    }
    if host.heads * host.head_width != host.dim and not kind.is_floor:  # the identity has no heads
        if "head_dim" not in fields:
            raise Refusal(
                f"heads of {name} would have {host.dim} / {host.heads} channels, but the layer's have {host.head_width}"
            )
        own["head_dim"] = host.head_width
    if options.get("share_layers"):
        raise Refusal(
            f"the layers of another model are swapped one by one, so {name} cannot have share_layers=True here"
        )
    shared = {option: value for option, value in own.items() if option in fields}
    mixer = build(name, dim=host.dim, heads=host.heads, causal=host.causal, **shared | options)
    return mixer.to(host.tensors["q.weight"])


def copy_weights(host: Host, mixer: Mixer) -> CopiedWeights:
    """Copies the weights of the host that the mixer has a place for."""
    parameters = dict(mixer.named_parameters())
    kept, filled = [], dict.fromkeys(parameters, 0)
    with torch.no_grad():
        for name, ref in _weight_map(host, mixer).items():
            if name not in host.tensors or ref.name not in parameters:
                continue
            target, given = ref.of(parameters[ref.name]), host.tensors[name]
            if target.shape == given.shape:
                target.copy_(given)
                kept.append(name)
                filled[ref.name] += len(given)
    new = []
    for name, tensor in mixer.state_dict().items():
        rows = filled.get(name, 0)
        if rows < (len(tensor) if tensor.dim() else 1):
            new.append(f"{name}[{rows}:]" if rows else name)
    return CopiedWeights(tuple(kept), tuple(new), tuple(name for name in host.tensors if name not in kept))


def _weight_map(host: Host, mixer: Mixer) -> WeightMap:
    refs: WeightMap = {}
    for name, parts in SAME_ROLE.items():
        if isinstance(getattr(mixer, name, None), nn.Linear):
            width = len(host.tensors[f"{parts.split()[0]}.weight"])
            refs |= map_stacked(parts.split(), name, width)
    return refs
