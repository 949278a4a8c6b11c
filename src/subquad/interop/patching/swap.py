"""Replaces the attention of another library's model by a mixer.

    report = subquad.swap(model, "eva", window=64, layers=[0, 1, 2])
    print(report)            # which layers were replaced, which weights were kept, and which are new
    ...                      # fine-tune the model as usual
    report.undo()            # restore the attention as it was

The trained maps of queries, keys, values and outputs serve the mixer, so `local` with a window that covers the input
computes what the model computed before. There are two forms. In BERT, ViT, GPT-2 and timm's models the mixer replaces
the layer, and the maps are copied to it. In layers with rotary positions, grouped queries or norms of queries and keys,
as Llama's, a mechanism with queries, keys and values works between the layer's own maps, which stay where they are,
with their names, and train as before; other mechanisms replace the layer there too. Norms and feed-forward networks
outside of attention are not changed.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

from torch import nn

from subquad.interop.patching import interface_hosts, timm_hosts, torch_hosts, transformers_hosts
from subquad.interop.patching.between import build_between, plan_between, prepare_call, weights_between
from subquad.interop.patching.copy_weights import build_replacement, copy_weights
from subquad.interop.patching.host import Adapter, Host, Refusal, SwappedAttention
from subquad.interop.patching.saving import write_into_config
from subquad.interop.patching.undo import Change, RefusedLayer, ReplacedLayer, SwapReport
from subquad.mixers import Mixer
from subquad.mixers.attention import AttentionMixer

ADAPTERS: dict[str, Adapter] = (
    transformers_hosts.ADAPTERS | interface_hosts.ADAPTERS | timm_hosts.ADAPTERS | torch_hosts.ADAPTERS
)
REFUSED = interface_hosts.REFUSED
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "multihead_attn")
"""Names, in models that use one class for both, of attention to another sequence."""
SET_BY_HOST = ("dim", "heads")
"""Options that follow from the host."""


def swap(model: nn.Module, mixer: str, *, layers: Iterable[int] | None = None, **options: Any) -> SwapReport:
    """Replaces the self-attention of a model, in place, by the mechanism `mixer`.

    layers: the numbers of the layers, from 0 in the order of the model; negative numbers count from its end. By default
    all layers are replaced. options: those of the mechanism (see `subquad info NAME`). The model decides its width,
    heads and direction. Layers of torch itself are called with a mask or without, and swapped for either by `causal`,
    by default False.
    """
    for option in SET_BY_HOST:
        if option in options:
            raise ValueError(f"{option} follows from the model whose attention is swapped; leave it out")
    all_found = _find_attention(model)
    own = [found for found in all_found if not found.reads_context]
    if not own:
        raise ValueError(f"{type(model).__name__} has no attention that can be swapped. Known are {_known()}")
    cross_attention = "it reads another sequence; only self-attention is swapped"
    refused = [found.refused(cross_attention) for found in all_found if found.reads_context]
    replaced: list[ReplacedLayer] = []
    changes: list[Change] = []
    between: list[nn.Module] = []
    for number in _layer_numbers(layers, len(own)):
        found = own[number]
        try:
            host, chosen = _with_direction(_describe(model, found), options)
            inner = build_between(host, mixer, chosen) if host.keeps_maps else None
            replacement = inner if inner is not None else build_replacement(host, mixer, chosen)
        except Refusal as reason:
            refused.append(found.refused(str(reason)))
            continue
        notes = _notes(host, replacement)
        if inner is not None:
            weights = weights_between(found.layer, host, inner)
            changes += plan_between(found.layer, host, inner)
            between.append(found.layer)
        else:
            weights = copy_weights(host, replacement)
            changes += _plan_changes(model, found, host, replacement)
        if _loses_cache(host, replacement):
            changes += _plan_no_cache(model, host)
        replaced.append(ReplacedLayer(number, found.path, found.kind, weights, notes))
    if not replaced:
        raise ValueError(f"no layer could be swapped; {refused[-1].path}: {refused[-1].reason}")
    for owner, name, _, after in changes:
        setattr(owner, name, after)
    on_undo = [layer.register_forward_pre_hook(prepare_call, with_kwargs=True).remove for layer in between]
    numbers = [layer.number for layer in replaced]
    take_out = write_into_config(model, {"mixer": mixer, "layers": numbers, "options": options})
    return SwapReport(mixer, replaced, refused, changes, [*on_undo, take_out] if take_out else on_undo)


class FoundLayer(NamedTuple):
    """An attention layer of a model, and its path."""

    path: str
    layer: nn.Module

    @property
    def kind(self) -> str:
        return type(self.layer).__name__

    @property
    def reads_context(self) -> bool:
        return getattr(self.layer, "is_cross_attention", False) or self.path.endswith(CROSS_ATTENTION)

    def refused(self, reason: str) -> RefusedLayer:
        return RefusedLayer(self.path, self.kind, reason)


def _find_attention(model: nn.Module) -> list[FoundLayer]:
    """Returns the attention layers in the order of the model, including those that were swapped before."""
    layers: list[FoundLayer] = []
    for path, layer in model.named_modules():
        if layers and path.startswith(f"{layers[-1].path}."):
            continue  # it is a part of the last one
        if _class_path(layer) in ADAPTERS | REFUSED or isinstance(layer, SwappedAttention):
            layers.append(FoundLayer(path, layer))
    return layers


def _known() -> str:
    kinds: dict[str, list[str]] = {}
    for path in ADAPTERS:
        kinds.setdefault(path.partition(".")[0], []).append(path.rpartition(".")[2])
    return "; ".join(f"{', '.join(names)} of {package}" for package, names in kinds.items())


def _class_path(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _layer_numbers(layers: Iterable[int] | None, count: int) -> list[int]:
    """Returns the numbers of the layers to swap, from 0, in order and without repetition."""
    if layers is None:
        return list(range(count))
    wanted = list(layers)
    for number in wanted:
        if not -count <= number < count:
            raise ValueError(f"there is no layer {number}: the model has {count} layers, 0 to {count - 1}")
    if not wanted:
        raise ValueError("layers is empty; leave it out to swap them all")
    return sorted({number % count for number in wanted})


def _describe(model: nn.Module, found: FoundLayer) -> Host:
    for module in found.layer.modules():
        if isinstance(module, SwappedAttention):
            raise Refusal(f"it was replaced by {module.mixer.name} already; undo that swap first")
    kind = _class_path(found.layer)
    if kind in REFUSED:
        raise Refusal(REFUSED[kind])
    if not found.path:
        raise Refusal("it is not inside a model; give the module that contains it")
    parents = [model.get_submodule(path) for path in _prefixes(found.path)]
    return ADAPTERS[kind](found.layer, parents)


def _with_direction(host: Host, options: dict[str, Any]) -> tuple[Host, dict[str, Any]]:
    """The host with its direction, and the options without it."""
    if "causal" not in options:
        return replace(host, causal=bool(host.causal)), options
    if host.causal is not None:
        raise ValueError("causal follows from the model whose attention is swapped; leave it out")
    rest = {option: value for option, value in options.items() if option != "causal"}
    return replace(host, causal=options["causal"]), rest


def _prefixes(path: str) -> list[str]:
    """The paths of all modules that contain the one at `path`, the whole model's first."""
    steps = path.split(".")[:-1]
    return [".".join(steps[:depth]) for depth in range(len(steps) + 1)]


def _notes(host: Host, mixer: Mixer) -> tuple[str, ...]:
    notes = []
    if host.attention_dropout and "attention_dropout" not in type(mixer.config).model_fields:
        notes.append(
            f"the dropout of attention weights ({host.attention_dropout}) is gone, because {mixer.name} has none"
        )
    if host.keeps_maps and not isinstance(mixer, AttentionMixer):
        notes.append(f"positions and norms inside the layer are gone, because {mixer.name} does not compare queries")
    if _regularises(mixer):
        notes.append(f"the regulariser of {mixer.name}, which subquad's training adds to the loss, is left out")
    if _loses_cache(host, mixer):
        notes.append(
            f"use_cache is now False, so generation reads the whole text for each token: {mixer.why_no_streaming()}"
        )
    return tuple(notes)


def _regularises(mixer: Mixer) -> bool:
    """Whether the mixer returns `aux` besides its output, according to the type of `mix`."""
    return any(kind is not None for kind in get_args(get_type_hints(mixer.mix).get("return"))[1:])


def _loses_cache(host: Host, mixer: Mixer) -> bool:
    return bool(host.causal) and host.config is not None and not mixer.can_stream


def _plan_changes(model: nn.Module, found: FoundLayer, host: Host, mixer: Mixer) -> list[Change]:
    """Returns the attributes to set so that `mixer` replaces the layer."""
    mixer.train(found.layer.training)
    replacements: dict[str, nn.Module] = {host.attention: host.wrap(mixer)}
    replacements |= {path: nn.Identity() for path in host.to_identity}
    changes = []
    for inner, after in replacements.items():
        owner, _, name = f"{found.path}.{inner}".rstrip(".").rpartition(".")
        parent = model.get_submodule(owner)
        changes.append(Change(parent, name, getattr(parent, name), after.train(mixer.training)))
    parents = (model.get_submodule(path) for path in _prefixes(found.path))
    # A mixer cannot read the nested tensors that nn.TransformerEncoder makes of padded batches.
    return changes + [
        Change(parent, "use_nested_tensor", True, False)
        for parent in parents
        if isinstance(parent, nn.TransformerEncoder) and parent.use_nested_tensor
    ]


def _plan_no_cache(model: nn.Module, host: Host) -> list[Change]:
    settings = [host.config, getattr(model, "generation_config", None)]
    # A cache that is off already is not changed, so two swaps can be undone in either order.
    enabled = [config for config in settings if config is not None and config.use_cache is not False]
    return [Change(config, "use_cache", config.use_cache, False) for config in enabled]
