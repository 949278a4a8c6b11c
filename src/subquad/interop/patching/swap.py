"""Replaces the attention of another library's model by a mixer.

    swapped = subquad.swap(model, "eva", window=64, layers=[0, 1, 2])
    print(swapped)           # what was replaced, which weights were kept, which are new
    ...                      # fine-tune the model as ever
    swapped.undo()           # the attention of before, as it was

Queries, keys, values and output maps go over to the mixer where it has them, so that `local` with a window that covers
the input computes what the model always computed. Everything else of the model stays: positions, norms, feed-forward.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, get_args, get_type_hints

from torch import nn

from subquad.interop.patching import timm_hosts, transformers_hosts
from subquad.interop.patching.copy_weights import carry_over, twin
from subquad.interop.patching.host import Adapter, Host, Refusal, SwappedAttention
from subquad.interop.patching.report import Change, Refused, Replaced, Swapped
from subquad.mixers import Mixer

ADAPTERS: dict[str, Adapter] = transformers_hosts.ADAPTERS | timm_hosts.ADAPTERS
DECIDED = ("dim", "heads", "causal")
"""Options that the host decides."""


def swap(model: nn.Module, mixer: str, *, layers: Iterable[int] | None = None, **options: Any) -> Swapped:
    """Replaces the self-attention of a model in place by the mechanism `mixer`.

    layers: which ones, counted from 0 in the order of the model (negative: from its end); all by default.
    options: those of the mechanism, see `subquad info NAME`; widths, heads and direction are the model's.
    """
    for option in DECIDED:
        if option in options:
            raise ValueError(f"{option} is decided by the model whose attention is swapped; leave it out")
    found = _find(model)
    own = [place for place in found if not place.reads_context]
    if not own:
        raise ValueError(
            f"{type(model).__name__} has no attention that can be swapped; known are BERT, RoBERTa, ViT, DeiT and "
            "GPT-2 of transformers 5, and timm's VisionTransformer"
        )
    elsewhere = "it reads another sequence; only self-attention is swapped"
    refused = [place.refused(elsewhere) for place in found if place.reads_context]
    replaced: list[Replaced] = []
    changes: list[Change] = []
    for number in _chosen(layers, len(own)):
        place = own[number]
        try:
            host = _described(model, place)
            stand_in = twin(host, mixer, options)
        except Refusal as reason:
            refused.append(place.refused(str(reason)))
            continue
        replaced.append(Replaced(number, place.path, place.kind, carry_over(host, stand_in), _notes(host, stand_in)))
        changes += _changes(model, place, host, stand_in)
    if not replaced:
        raise ValueError(f"no layer could be swapped; {refused[-1].path}: {refused[-1].reason}")
    for owner, name, _, after in changes:
        setattr(owner, name, after)
    return Swapped(mixer, replaced, refused, changes)


class Place(NamedTuple):
    """An attention layer of a model."""

    path: str
    layer: nn.Module

    @property
    def kind(self) -> str:
        return type(self.layer).__name__

    @property
    def reads_context(self) -> bool:
        return getattr(self.layer, "is_cross_attention", False)

    def refused(self, reason: str) -> Refused:
        return Refused(self.path, self.kind, reason)


def _find(model: nn.Module) -> list[Place]:
    """Attention layers in the order of the model, those that were swapped before included."""
    places: list[Place] = []
    for path, layer in model.named_modules():
        if places and path.startswith(f"{places[-1].path}."):
            continue  # a part of the last one
        if _class_path(layer) in ADAPTERS or isinstance(layer, SwappedAttention):
            places.append(Place(path, layer))
    return places


def _class_path(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _chosen(layers: Iterable[int] | None, count: int) -> list[int]:
    """Numbers from 0 on, in order, without repetition."""
    if layers is None:
        return list(range(count))
    wanted = list(layers)
    for number in wanted:
        if not -count <= number < count:
            raise ValueError(f"there is no layer {number}: the model has {count} of them, 0 to {count - 1}")
    if not wanted:
        raise ValueError("layers is empty; leave it out to swap them all")
    return sorted({number % count for number in wanted})


def _described(model: nn.Module, place: Place) -> Host:
    for module in place.layer.modules():
        if isinstance(module, SwappedAttention):
            raise Refusal(f"it holds {module.mixer.name} already; undo that swap first")
    if not place.path:
        raise Refusal("it is not inside a model; give the module that contains it")
    steps = place.path.split(".")[:-1]
    around = [model.get_submodule(".".join(steps[:depth])) for depth in range(len(steps) + 1)]
    return ADAPTERS[_class_path(place.layer)](place.layer, around)


def _notes(host: Host, mixer: Mixer) -> tuple[str, ...]:
    notes = []
    if host.attention_dropout and "attention_dropout" not in type(mixer.config).model_fields:
        notes.append(f"dropout of attention weights ({host.attention_dropout}) is gone: {mixer.name} has none")
    if _regularises(mixer):
        notes.append(f"the regulariser of {mixer.name}, which training here adds to the loss, is left out")
    if _loses_cache(host, mixer):
        notes.append(f"use_cache is now False, so that generating reads all again: {mixer.why_no_streaming()}")
    return tuple(notes)


def _regularises(mixer: Mixer) -> bool:
    """Whether it gives `aux` beside its output: where there is none, the type of `mix` says so."""
    return any(kind is not None for kind in get_args(get_type_hints(mixer.mix).get("return"))[1:])


def _loses_cache(host: Host, mixer: Mixer) -> bool:
    return host.causal and not mixer.can_stream


def _changes(model: nn.Module, place: Place, host: Host, mixer: Mixer) -> list[Change]:
    """What has to be set for `mixer` to stand in a layer's place."""
    mixer.train(place.layer.training)
    stand_ins: dict[str, nn.Module] = {host.attention: host.wrap(mixer)}
    stand_ins |= {path: nn.Identity() for path in host.emptied}
    changes = []
    for inner, after in stand_ins.items():
        owner, _, name = f"{place.path}.{inner}".rstrip(".").rpartition(".")
        parent = model.get_submodule(owner)
        changes.append(Change(parent, name, getattr(parent, name), after.train(mixer.training)))
    if _loses_cache(host, mixer):
        settings = [host.config, getattr(model, "generation_config", None)]
        # What is off already is left alone, so that two swaps can be undone in either order.
        on = [config for config in settings if config is not None and config.use_cache is not False]
        changes += [Change(config, "use_cache", config.use_cache, False) for config in on]
    return changes
