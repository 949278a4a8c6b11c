"""What a comparison would train, without its data and without computing anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.compare.comparison import SEEDS, choose_seeds, choose_variants
from subquad.compare.matching import Match, count_parameters, match_parameters
from subquad.compare.variants import Variant, add_finished_runs, add_floor
from subquad.train.recipe import Recipe


@dataclass(frozen=True)
class PlannedMechanism:
    """A mechanism, the parameters of its model, and the seeds of its trials. runs: finished ones, by their seeds."""

    variant: Variant
    parameters: int
    seeds: tuple[int, ...]
    runs: dict[int, str]


def plan_mechanisms(
    recipe: Recipe,
    mixers: Sequence[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    runs: Sequence[str] = (),
    baseline: str = "softmax",
    seeds: int | Sequence[int] = SEEDS,
    match: Match = "parameters",
    floors: bool = True,
    tune: int = 0,  # noqa: ARG001
) -> list[PlannedMechanism]:
    """The mechanisms of a comparison; the arguments are those of `Comparison.create`.

    Vocabularies and classes are those that the recipe names. The data may have others, and the widths that match
    numbers of parameters then change with them.
    """
    data_dependent = recipe.task_class.expected_model_config(recipe.data)
    variants = choose_variants(recipe, mixers, options, runs, baseline)
    variants = add_floor(recipe, variants) if floors and variants else variants
    if variants and match == "parameters":
        variants = match_parameters(recipe, variants, data_dependent)
    variants, finished = add_finished_runs(recipe, variants, runs)
    planned = []
    for variant in variants:
        own = {run.seed: run.folder for run in finished if run.label == variant.label}
        trained = choose_seeds(recipe, seeds) if variant.trained else ()
        parameters = count_parameters(recipe, variant, data_dependent)
        planned.append(PlannedMechanism(variant, parameters, tuple(dict.fromkeys([*trained, *own])), own))
    return planned
