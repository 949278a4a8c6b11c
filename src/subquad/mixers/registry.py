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
        if not documentation(mixer):
            raise ValueError(f"the file or class of mechanism {name!r} needs a docstring: equation, cost, citation")
        mixer.name = name
        _REGISTRY[name] = mixer
        return mixer

    return add


def documentation(mixer: "type[Mixer]") -> str:
    """What a mechanism says about itself: the docstring of its class, or of its file when the class has none."""
    return mixer.__doc__ or sys.modules[mixer.__module__].__doc__ or ""


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


Ability = Literal["bidirectional", "causal", "cross"]
REASONS: dict[Ability, str] = {
    "bidirectional": "cannot look both ways: it is causal only, so that no output sees a later position",
    "causal": "cannot be causal: every output depends on the whole sequence",
    "cross": "cannot read a context: it has no cross-attention form",
}


def why_not(mixer: "type[Mixer]", ability: Ability) -> str | None:
    """Why the mechanism lacks an ability, whatever its options, as a sentence without its full stop; or None."""
    return None if getattr(mixer.capabilities, ability) else f"{mixer.name} {REASONS[ability]}"


def refuse(mixer: "type[Mixer]", ability: Ability) -> None:
    """Raises ValueError if the mechanism lacks an ability, and names those that have it."""
    reason = why_not(mixer, ability)
    if reason is not None:
        raise ValueError(f"{reason}. {who_can(ability)}")


def who_can(ability: Ability | Literal["state"]) -> str:
    """Names the mechanisms that can do what another refused."""
    able = {
        "bidirectional": ("mechanisms that look both ways", lambda c: c.bidirectional),
        "causal": ("causal mechanisms", lambda c: c.causal),
        "cross": ("mechanisms with cross-attention", lambda c: c.cross),
        "state": ("mechanisms that stream when causal", lambda c: c.causal and c.state != "none"),
    }
    what, test = able[ability]
    names = [name for name in available() if test(_REGISTRY[name].capabilities)]
    return f"The {what} are {', '.join(names)}."
