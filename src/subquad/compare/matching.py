"""Equal numbers of parameters: feed-forward networks as wide as it takes to have as many as the baseline.

A mechanism that has more parameters than the baseline may be better for that reason alone. The number of parameters is
linear in the width of the feed-forward networks, so two counts give the width. Only stacks change whose mechanism is
not the baseline's. Where no width will do, the numbers stay as different as they are, and the page says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from subquad.compare.settings import change_recipe
from subquad.compare.variants import RECIPE_MODEL, Variant
from subquad.models import MODELS, build_from_config
from subquad.train.recipe import Recipe

Match = Literal["parameters", "none"]
TOLERANCE = 0.02
"""Numbers of parameters that differ by less than this are equal."""
MULTIPLES = (8, 1)
"""Widths are multiples of the first if that is exact enough: hardware likes those."""
NARROWEST = 0.25
"""The least that may be left of a width: a model with hardly any feed-forward networks is another model."""


def count_parameters(recipe: Recipe, variant: Variant, data_dependent: Mapping[str, Any]) -> int:
    """The parameters of a variant's model; no weights are made."""
    options = _variant_model(recipe, variant, data_dependent)
    with torch.device("meta"):
        return build_from_config(options).parameter_count()


def match_parameters(recipe: Recipe, variants: Sequence[Variant], data_dependent: Mapping[str, Any]) -> list[Variant]:
    """The variants, with widths that give each as many parameters as the first one has."""
    return [variants[0], *(_match(recipe, one, variants[0], data_dependent) for one in variants[1:])]


def _match(recipe: Recipe, variant: Variant, baseline: Variant, data_dependent: Mapping[str, Any]) -> Variant:
    wanted, given = (count_parameters(recipe, one, data_dependent) for one in (baseline, variant))
    widths = _widths(recipe, variant, baseline)
    if abs(given / wanted - 1) <= TOLERANCE or variant.mixer == RECIPE_MODEL or not widths:
        return variant
    doubled = _set_widths(variant, {name: 2 * width for name, width in widths.items()})
    factor = 1 + (wanted - given) / (count_parameters(recipe, doubled, data_dependent) - given)
    for multiple in MULTIPLES if factor >= NARROWEST else ():
        changed = {name: max(1, multiple * round(factor * width / multiple)) for name, width in widths.items()}
        candidate = _set_widths(variant, changed)
        if abs(count_parameters(recipe, candidate, data_dependent) / wanted - 1) <= TOLERANCE:
            return candidate
    return variant


def _widths(recipe: Recipe, variant: Variant, baseline: Variant) -> dict[str, int]:
    """The widths that may change, by the name of their setting: of stacks with another mechanism, or else of all.

    A width that was set for this mechanism stays. A pyramid has none: its stages are no settings.
    """
    ours, theirs = (_variant_model(recipe, one, {}) for one in (variant, baseline))
    kind = MODELS[ours["kind"]].Config
    names = [name for name in kind.stacks if f"model.{name}.ffn_dim" not in variant.settings]
    model, other = kind.parse("model", ours), kind.parse("model", theirs)
    differ = [name for name in names if getattr(model, name).mixer != getattr(other, name).mixer]
    return {f"model.{name}.ffn_dim": getattr(model, name).ffn_dim for name in differ or names}


def _variant_model(recipe: Recipe, variant: Variant, data_dependent: Mapping[str, Any]) -> dict[str, Any]:
    """The complete config of a variant's model."""
    return recipe.model_copy(update={"model": variant.model}).model_data(data_dependent)


def _set_widths(variant: Variant, widths: Mapping[str, int]) -> Variant:
    model = change_recipe({"model": variant.model}, widths)["model"]
    return variant.model_copy(update={"model": model, "widths": {**variant.widths, **widths}})
