"""The attention layers of a model and what may take their places, side by side.

`swap` builds the mixers. Here they can be put in and taken out layer by layer, so that teacher and student share every
weight outside of these layers, and no second copy of the model is needed.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from subquad.interop.patching import SwapReport, swap
from subquad.interop.patching.host import SwappedAttention
from subquad.interop.patching.saving import write_into_config
from subquad.interop.patching.undo import ABSENT, Change
from subquad.nn.stack import MixerChoice

KEPT = "softmax"
"""The name, in a pattern of layers, of those that keep the attention they have."""


class AttentionLayer(NamedTuple):
    """One attention layer of a model, and what may take its place.

    attention: the module that is replaced. after_attention: what the replacement does too, such as BERT's output map,
    in the order of the model. replacement: has the interface of `attention`, and weights of its own. changes: the
    attributes to set so that it stands in the model.
    """

    number: int
    mechanism: str
    options: dict[str, Any]
    attention: nn.Module
    after_attention: tuple[nn.Module, ...]
    replacement: nn.Module
    changes: tuple[Change, ...]

    def target(self, output: Any) -> Tensor:
        """Returns what the replacement has to compute (batch, time, channels), from the output of the attention."""
        y: Tensor = output[0] if isinstance(output, tuple) else output
        for module in self.after_attention:
            y = module(y)
        return y

    def put_in(self) -> None:
        for change in self.changes:
            setattr(change.owner, change.name, change.after)

    def take_out(self) -> None:
        for change in reversed(self.changes):
            setattr(change.owner, change.name, change.before)


class AttentionLayers:
    """The layers of a model that are to be replaced, by number. At first the attention is in its place."""

    def __init__(self, model: nn.Module, choice: MixerChoice) -> None:
        """choice: the mechanism, or a pattern in which softmax stands for layers that stay as they are."""
        if choice.name.strip() == KEPT:
            raise ValueError("softmax is what the model has already; name the mechanism that takes its place")
        self.model = model
        self.numbers = replaceable_layers(model)
        self.layers: dict[int, AttentionLayer] = {}
        for number, (name, options) in zip(self.numbers, choice.by_layer(len(self.numbers)), strict=True):
            if name != KEPT:
                self.layers[number] = _build(model, number, name, options)
        if not self.layers:
            raise ValueError(f"the pattern {choice.name!r} replaces no layer")

    @property
    def replacements(self) -> nn.ModuleDict:
        """What takes the places of attention, by number, as one module."""
        return nn.ModuleDict({str(number): layer.replacement for number, layer in self.layers.items()})

    @property
    def mixers(self) -> list[nn.Module]:
        """The mechanisms, without the maps around them that are the teacher's where these are copied."""
        return [module for module in self.replacements.modules() if isinstance(module, SwappedAttention)]

    @contextmanager
    def replaced(self, numbers: Iterable[int] | None = None) -> Iterator[None]:
        """Within the block these layers are replaced; None: all of them."""
        chosen = [self.layers[number] for number in (self.layers if numbers is None else numbers)]
        for layer in chosen:
            layer.put_in()
        try:
            yield
        finally:
            for layer in reversed(chosen):
                layer.take_out()

    def install(self) -> None:
        """Replaces all layers, for good or until `take_out`."""
        for layer in self.layers.values():
            layer.put_in()

    def take_out(self) -> None:
        """Puts the attention back."""
        for layer in reversed(self.layers.values()):
            layer.take_out()

    def drop(self, numbers: Iterable[int]) -> None:
        """Keeps the attention of these layers for good."""
        for number in numbers:
            del self.layers[number]

    def write_into_config(self) -> None:
        """Writes into the config of the model what was swapped, so that `load_swapped` can load it."""
        swaps: list[dict[str, Any]] = []
        for number, layer in self.layers.items():
            same = {"mixer": layer.mechanism, "options": layer.options}
            known = next((one for one in swaps if same.items() <= one.items()), None)
            if known is None:
                swaps.append(known := {**same, "layers": []})
            known["layers"].append(number)
        for one in swaps:
            write_into_config(self.model, one)

    def count_tokens(self, forward: Callable[[], object]) -> int:
        """Returns how many tokens the first of these layers gets in a pass of the model."""
        lengths: list[int] = []

        def see(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = arguments[0] if arguments else options["hidden_states"]
            lengths.append(given.shape[1])

        first = next(iter(self.layers.values()))
        handle = first.attention.register_forward_pre_hook(see, with_kwargs=True)
        forward()
        handle.remove()
        return lengths[0]

    def mechanisms(self) -> list[str]:
        """Returns the mechanism of every layer that could be replaced."""
        return [self.layers[number].mechanism if number in self.layers else KEPT for number in self.numbers]


def replaceable_layers(model: nn.Module) -> list[int]:
    """Returns the numbers of the self-attention layers that `swap` can replace; without any it raises a ValueError."""
    probe = swap(model, "identity")
    _undo(probe)
    return [layer.number for layer in probe.replaced]


def _undo(report: SwapReport) -> None:
    """Undoes a swap whose mixer is still needed, and may have no parameters."""
    for change in reversed(report.changes):
        if change.before is ABSENT:
            delattr(change.owner, change.name)
        else:
            setattr(change.owner, change.name, change.before)
    for act in report.on_undo:
        act()


def _build(model: nn.Module, number: int, name: str, options: dict[str, Any]) -> AttentionLayer:
    report = swap(model, name, layers=[number], **options)
    (main,) = [change for change in report.changes if isinstance(change.after, SwappedAttention)]
    if main.before is not ABSENT:
        after = tuple(change.before for change in report.changes if type(change.after) is nn.Identity)
        _undo(report)
        return AttentionLayer(number, name, options, main.before, after, main.after, tuple(report.changes))
    # The mixer works between the maps of the layer, which stay the teacher's: the replacement has copies of them.
    layer: nn.Module = main.owner
    replacement = copy.deepcopy(layer)
    _undo(report)
    settings = [change for change in report.changes if change.owner is not layer]
    owner, _, attribute = report.replaced[0].path.rpartition(".")
    place = Change(model.get_submodule(owner), attribute, layer, replacement)
    return AttentionLayer(number, name, options, layer, (), replacement, (place, *settings))
