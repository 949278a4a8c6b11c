"""What is set for one mechanism of a comparison: options of the mechanism, and changes to sections of its recipe.

Both are given together, as {"window": 64, "schedule": {"lr": 1e-3}}: a name of SECTIONS is a section of the recipe,
every other name an option of the mechanism. Changes are kept by their dotted names, {"schedule.lr": 1e-3}, which is how
they are written and shown.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from subquad.config import merge_options, nearest
from subquad.train.recipe import Recipe

SECTIONS = ("model", "optim", "schedule", "train")
"""The sections of a recipe that may differ between the mechanisms of a comparison."""
FIXED = {
    "train.seed": "every mechanism is trained with the same seeds, which --seeds chooses",
    "model.kind": "mechanisms are compared in one kind of model",
    "model.preset": "mechanisms are compared in one model; its options can be set one by one",
    "model.stages": "it would replace the mechanism of every stage",
}
MIXERS = (".mixer", ".mixer.name")
"""How the names of settings end that would replace the mechanism itself."""


def split_settings(label: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a mechanism, and the changes to its recipe by dotted names."""
    options: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    able = f"{', '.join(SECTIONS[:-1])} and {SECTIONS[-1]}"
    for name, value in given.items():
        first, dot, _ = name.partition(".")
        if first in SECTIONS:
            changes |= _flatten(name, value)
        elif first in Recipe.model_fields:
            raise ValueError(f"{label}.{name}: all mechanisms have the same {first}; only options of {able} can differ")
        elif dot:
            raise ValueError(f"{label}.{name}: {first!r} is none of the sections {able}{nearest(first, SECTIONS)}")
        else:
            options[name] = value
    for name in changes:
        if name in SECTIONS:
            raise ValueError(f"{label}.{name}: name an option of the section {name}, such as {label}.schedule.lr")
        if name in FIXED:
            raise ValueError(f"{label}.{name} cannot be set: {FIXED[name]}")
    for name in (*options, *changes):
        if name == "name" or name.endswith(MIXERS):
            raise ValueError(f"{label}.{name} cannot be set: it would replace {label}; compare a pattern of mechanisms")
    return options, changes


def change_recipe(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a recipe with changes by dotted names."""
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name} cannot be set: {part} was given a value of its own")
        place[last] = value
    return merge_options(recipe, nested)


def read_settings(recipe: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What a recipe says under dotted names: YAML reads 1e-3 as text, and a recipe that was checked as a number."""
    return {name: reduce(lambda place, part: place[part], name.split("."), recipe) for name in names}


def _flatten(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {key: leaf for part, inner in value.items() for key, leaf in _flatten(f"{name}.{part}", inner).items()}
