"""The registry of mechanisms: what `build("eva", dim=512)` finds, and what refusals can recommend instead.

A class decorated with `@register("name")` is known to `build`, recipes, the command line, the docs and the tests.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from subquad.config import nearest

if TYPE_CHECKING:
    from subquad.mixers.base import Mixer

_REGISTRY: dict[str, "type[Mixer]"] = {}
MixerType = TypeVar("MixerType", bound="type[Mixer]")


def register(name: str) -> Callable[[MixerType], MixerType]:
    """Class decorator: makes a mixer known under `name` to `build`, the command line, the docs and the tests."""

    def add(mixer: MixerType) -> MixerType:
        if name in _REGISTRY:
            raise ValueError(f"two mechanisms are called {name!r}: {_REGISTRY[name].__module__} and {mixer.__module__}")
        if not sys.modules[mixer.__module__].__doc__:
            raise ValueError(f"the file of mechanism {name!r} needs a docstring: equation, cost, citation")
        mixer.name = name
        _REGISTRY[name] = mixer
        return mixer

    return add


def available() -> list[str]:
    """Names of all mechanisms, sorted, softmax (the baseline) first."""
    return sorted(_REGISTRY, key=lambda name: (name != "softmax", name))


def mixer_class(name: str) -> "type[Mixer]":
    """The class registered under `name`."""
    if name not in _REGISTRY:
        raise ValueError(
            f"no mechanism is called {name!r}{nearest(name, _REGISTRY)} Mechanisms: {', '.join(available())}."
        )
    return _REGISTRY[name]


def build(name: str, **options: Any) -> "Mixer":
    """Builds a mixer: `build("eva", dim=512, heads=8, window=64)`. See `subquad info NAME` for its options."""
    return mixer_class(name)(**options)


def refuse(name: str, place: Literal["causal", "cross"]) -> None:
    """Raises ValueError if the mechanism cannot stand there, whatever its options."""
    has = mixer_class(name).capabilities
    if place == "causal" and not has.causal:
        raise ValueError(f"{name} cannot be causal: every output depends on the whole sequence. {who_can('causal')}")
    if place == "cross" and not has.cross:
        raise ValueError(f"{name} cannot read a context: it has no cross-attention form. {who_can('cross')}")


def who_can(ability: str) -> str:
    """Names the mechanisms that can do what another refused."""
    able = {
        "causal": ("causal mechanisms", lambda c: c.causal),
        "cross": ("mechanisms with cross-attention", lambda c: c.cross),
        "state": ("mechanisms that stream when causal", lambda c: c.causal and c.state != "none"),
    }
    what, test = able[ability]
    names = [name for name in available() if test(_REGISTRY[name].capabilities)]
    return f"The {what} are {', '.join(names)}."
