"""The registry of mechanisms: what `build("eva", dim=512)` finds, and what refusals recommend instead.

A class decorated with `@register("name")` is known to `build`, recipes, the command line, the docs and the tests.
Mechanisms come from three places:

    the files of this folder      all imported with the package
    installed packages            an entry point of the group `subquad.mixers`, from the name of a mechanism to its
                                  module or class; imported when the name is asked for
    modules that the user names   `--plugin MODULE` or `load_plugin("MODULE")`; imported when any mechanism is asked for

Nothing else is imported: a recipe, run or checkpoint names mechanisms, never modules.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from subquad.config import unknown_mechanism
from subquad.packages import name_plugins, plugins

if TYPE_CHECKING:
    from subquad.mixers.base import Mixer

GROUP = "subquad.mixers"

_REGISTRY: dict[str, "type[Mixer]"] = {}
_IMPORTED: set[str] = set()
"""Modules among the user's plugins that have been imported."""
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
    """Names of all mechanisms, sorted, softmax (the baseline) first. Floors are no mechanisms: see `is_floor`."""
    _import_plugins()
    return sorted({*_REGISTRY, *_entry_points()} - set(floors()), key=lambda name: (name != "softmax", name))


def floors() -> list[str]:
    """Names of what stands in the place of a mechanism to compare with: see `is_floor`."""
    return [name for name, mixer in _REGISTRY.items() if mixer.is_floor]


def loadable() -> tuple[list[str], list[str]]:
    """Names of all mechanisms whose package can be loaded, and what is wrong with the others."""
    names, problems = [], []
    for name in available():
        try:
            mixer_class(name)
            names.append(name)
        except ValueError as error:
            problems.append(str(error))
    return names, problems


def mixer_class(name: str) -> "type[Mixer]":
    """The class registered under `name`."""
    _import_plugins()
    if name in _entry_points():
        _load_entry_point(name)
    if name not in _REGISTRY:
        raise ValueError(unknown_mechanism(name, available()))
    return _REGISTRY[name]


def build(name: str, **options: Any) -> "Mixer":
    """Builds a mixer: `build("eva", dim=512, heads=8, window=64)`. See `subquad info NAME` for its options."""
    return mixer_class(name)(**options)


# ---------------------------------------------------------------------- abilities

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
    """Names the mechanisms that can do what another refused, among those that are imported already."""
    able = {
        "bidirectional": ("mechanisms that look both ways", lambda c: c.bidirectional),
        "causal": ("causal mechanisms", lambda c: c.causal),
        "cross": ("mechanisms with cross-attention", lambda c: c.cross),
        "state": ("mechanisms that stream when causal", lambda c: c.causal and c.state != "none"),
    }
    what, test = able[ability]
    names = [name for name in available() if name in _REGISTRY and test(_REGISTRY[name].capabilities)]
    return f"The {what} are {', '.join(names)}."


# ---------------------------------------------------------------------- mechanisms of other packages


def load_plugin(module: str) -> None:
    """Imports a module that registers mechanisms; child processes, such as those of a comparison, import it as well.

    The current folder is searched last.
    """
    name_plugins(module)
    _import_plugins()


def _import_plugins() -> None:
    for module in plugins():
        if module not in _IMPORTED:
            _IMPORTED.add(module)  # first: the module may ask for other mechanisms
            try:
                _import_plugin(module)
            except Exception as error:
                _IMPORTED.discard(module)
                problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise ValueError(f"the plugin {module} cannot be used: {problem}") from error


def _import_plugin(module: str) -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    before = set(_REGISTRY)
    importlib.import_module(module)
    inside = [mixer for mixer in _REGISTRY.values() if f"{mixer.__module__}.".startswith(f"{module}.")]
    if before == set(_REGISTRY) and not inside:
        raise ValueError("it registers no mechanism; decorate a Mixer with @subquad.mixers.register")


@functools.cache
def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of installed packages, by the name of their mechanism: more than one is a collision."""
    found: dict[str, dict[str, metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        found.setdefault(point.name, {})[point.value] = point  # an editable installation may be found twice
    return {name: list(points.values()) for name, points in found.items()}


def _load_entry_point(name: str) -> None:
    """Registers the mechanism of an installed package; refuses a name that another mechanism has as well."""
    point, *others = _entry_points()[name]
    known = _REGISTRY.get(name)
    if known is not None and not others and _top(known.__module__) == _top(point.module):
        return
    owners = [_package(each) for each in (point, *others)]
    owners += [f"the module {known.__module__}"] if known is not None else []
    if len(owners) > 1:
        raise ValueError(f"several mechanisms are called {name!r}, of {' and '.join(owners)}: uninstall or rename one")
    try:
        found = point.load()
        if isinstance(found, type) and found not in _REGISTRY.values():
            register(name)(found)
        if name not in _REGISTRY:
            raise ValueError(f"{point.value} registers no mechanism of this name")
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the mechanism {name!r} of {owners[0]} cannot be loaded: {problem}") from error


def _package(point: metadata.EntryPoint) -> str:
    return f"the package {point.dist.name} {point.dist.version}" if point.dist is not None else f"({point.value})"


def _top(module: str) -> str:
    return module.partition(".")[0]


# ---------------------------------------------------------------------- where mechanisms came from


def origins(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Where those of the mechanisms come from that are not our own: module, and package and version if it has them."""
    found = {}
    for name in names:
        module = mixer_class(name).__module__
        if _top(module) != _top(__name__):
            found[name] = {"module": module, **_distribution(name, module)}
    return found


def _distribution(name: str, module: str) -> dict[str, str]:
    points = _entry_points().get(name)
    if points and points[0].dist is not None:
        return {"package": points[0].dist.name, "version": points[0].dist.version}
    packages = metadata.packages_distributions().get(_top(module))
    return {"package": packages[0], "version": metadata.version(packages[0])} if packages else {}


def check_origins(owner: str, stored: Mapping[str, Mapping[str, str]]) -> None:
    """Refuses what needs mechanisms that are not here. stored: what `origins` said when `owner` was written."""
    known = available()
    for name, origin in stored.items():
        if name not in known:
            package = f"package {origin['package']} {origin['version']}" if "package" in origin else "user's module"
            raise ValueError(
                f"{owner} needs the mechanism {name!r} of the {package}, which is not here; install it if you trust "
                f"it, or name its module with --plugin {origin['module']}"
            )
