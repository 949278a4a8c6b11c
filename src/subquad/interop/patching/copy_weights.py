"""Which of an attention layer's trained weights a mixer has a place for."""

from typing import NamedTuple

import torch
from torch import nn

from subquad.interop.checkpoints.weight_map import Slots, stacked_slots
from subquad.interop.patching.host import Host, Refusal
from subquad.mixers import Mixer, build, mixer_class

PLACES = {"qkv": "q k v", "qk": "q k", "in_proj": "v", "out": "out", "out_proj": "out"}
"""Linear maps of mixers by their names, and which maps of attention do the same work, from the first row on.

A convolution's input map makes the values it mixes; where it is gated, the gates are its later rows.
"""


class Carried(NamedTuple):
    """Names of tensors: the host's that went into the mixer, the mixer's own that are as initialised (rows from the
    first new one on, where a tensor is kept in part), and the host's that have no place."""

    kept: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


def twin(host: Host, name: str, options: dict[str, object]) -> Mixer:
    """A mixer of the host's shape: its widths, biases and dropout where the mechanism has such options."""
    fields = mixer_class(name).Config.model_fields
    own: dict[str, object] = {
        "attention_dropout": host.attention_dropout,
        "dropout": host.dropout,
        "qkv_bias": "q.bias" in host.tensors,
        "qk_bias": "q.bias" in host.tensors,
    }
    if host.heads * host.head_width != host.dim:
        if "head_dim" not in fields:
            raise Refusal(f"{name} has heads of {host.dim} / {host.heads} channels; the layer's have {host.head_width}")
        own["head_dim"] = host.head_width
    if options.get("share_layers"):
        raise Refusal(f"layers of another model are swapped one by one: {name} cannot have share_layers=True here")
    shared = {option: value for option, value in own.items() if option in fields}
    mixer = build(name, dim=host.dim, heads=host.heads, causal=host.causal, **shared | options)
    return mixer.to(host.tensors["q.weight"])


def carry_over(host: Host, mixer: Mixer) -> Carried:
    """Copies the host's weights to where the mixer has a place for them."""
    parameters = dict(mixer.named_parameters())
    kept, filled = [], dict.fromkeys(parameters, 0)
    with torch.no_grad():
        for name, slot in _places(host, mixer).items():
            if name not in host.tensors or slot.name not in parameters:
                continue
            target, given = slot.of(parameters[slot.name]), host.tensors[name]
            if target.shape == given.shape:
                target.copy_(given)
                kept.append(name)
                filled[slot.name] += len(given)
    new = []
    for name, tensor in mixer.state_dict().items():
        rows = filled.get(name, 0)
        if rows < (len(tensor) if tensor.dim() else 1):
            new.append(f"{name}[{rows}:]" if rows else name)
    return Carried(tuple(kept), tuple(new), tuple(name for name in host.tensors if name not in kept))


def _places(host: Host, mixer: Mixer) -> Slots:
    slots: Slots = {}
    for name, parts in PLACES.items():
        if isinstance(getattr(mixer, name, None), nn.Linear):
            width = len(host.tensors[f"{parts.split()[0]}.weight"])
            slots |= stacked_slots(parts.split(), name, width)
    return slots
