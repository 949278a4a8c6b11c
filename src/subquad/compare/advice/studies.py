"""Costs by length that advice rests on: of single layers or of a recipe's model, measured here, or of a stored result.

A study holds what one machine measured. Costs are of a training pass for one sequence: the cost of a batch divided by
its sequences.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from subquad.compare.measure.bench import BASELINE, BenchPlan, run_bench
from subquad.compare.measure.lengths import LengthPoint, measure_length, shape_at
from subquad.compare.plan import Plan
from subquad.compare.report.result import Result, read_result
from subquad.compare.report.speed import shown_part
from subquad.compare.report.study import FILE as STUDY
from subquad.compare.report.study import read_study
from subquad.compare.statistics.cost_models import LEAST_LENGTHS, CostModels, fit_costs
from subquad.compare.variants import build_variants
from subquad.models.costs import FLOAT_BYTES, TRAINING_COPIES
from subquad.train.recipe import Recipe

OnStep = Callable[[int, int, str], None]
"""Receives how many steps are done, of how many, and what was the last."""
MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean, for normal values."""


@dataclass(frozen=True)
class Observation:
    """A mechanism at one length: seconds of every round, and the peak of memory, for one sequence."""

    length: int
    seconds: tuple[float, ...]
    bytes: float


@dataclass
class CostStudy:
    """Costs of mechanisms that were measured side by side. what: whose costs they are, for people.

    fixed_bytes: memory that does not depend on the length: the weights, their gradients and the averages of Adam; of
    single layers it is not counted. refused: mechanisms that cannot be used, with the reason. result: the stored result
    that the study was read from.
    """

    what: str
    baseline: str
    observations: dict[str, list[Observation]] = field(default_factory=dict)
    fixed_bytes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    result: Result | None = None

    def lengths(self, *names: str) -> list[int]:
        """Those at which all of these mechanisms were measured."""
        measured = [{found.length for found in self.observations.get(name, [])} for name in names]
        return sorted(set.intersection(*measured))

    def fit_seconds(self, *names: str) -> CostModels:
        """Models of the time of some mechanisms, from the lengths that all of them have."""
        lengths, costs, noise = self.lengths(*names), dict[str, list[float]](), dict[str, float]()
        for name in names:
            found = self._at(name, lengths)
            costs[name] = [statistics.median(one.seconds) for one in found]
            noise[name] = _noise(found)
        return fit_costs(lengths, costs, noise)

    def fit_bytes(self, name: str) -> CostModels:
        """A model of the peak of memory, which is the same in every round."""
        lengths = self.lengths(name)
        return fit_costs(lengths, {name: [one.bytes for one in self._at(name, lengths)]}, {name: 0.0})

    def _at(self, name: str, lengths: Sequence[int]) -> list[Observation]:
        by_length = {found.length: found for found in self.observations[name]}
        return [by_length[length] for length in lengths]


def _noise(found: Sequence[Observation]) -> float:
    """The standard deviation of the logarithm of a median of rounds, pooled over lengths; 0 if there was one round."""
    repeated = [[math.log(value) for value in one.seconds] for one in found if len(one.seconds) > 1]
    if not repeated:
        return 0.0
    variances = [statistics.variance(logs) / len(logs) for logs in repeated]
    return MEDIAN_ERROR * math.sqrt(statistics.fmean(variances))


# ---------------------------------------------------------------------- measured here


def measure_layers(plan: BenchPlan, on_step: OnStep) -> CostStudy:
    """Single layers, as `subquad bench` measures them."""
    done = 0

    def step(message: str) -> None:
        nonlocal done
        done += 1
        on_step(done, plan.steps, message)

    form = "causal " if plan.causal else ""
    study = CostStudy(f"one {form}layer of width {plan.dim} with {plan.heads} heads, measured here", BASELINE)
    for row in run_bench(plan, step):
        if row.status != "done":
            study.refused.setdefault(row.mixer, str(row.reason))
            continue
        seconds = tuple(value / plan.batch for value in row.seconds["training"])
        assert row.training_bytes is not None, "a row that is done has its memory"
        found = Observation(row.length, seconds, row.training_bytes / plan.batch)
        study.observations.setdefault(row.mixer, []).append(found)
        study.fixed_bytes[row.mixer] = 0
    return study


def measure_recipe(
    name: str, recipe: Recipe, mixers: Sequence[str], lengths: Sequence[int], rounds: int, on_step: OnStep
) -> CostStudy:
    """The whole model of a recipe with each mechanism in it, on one random sequence, as `subquad compare` measures it.

    Vocabularies and classes are those that the recipe names: no data is read.
    """
    study = CostStudy(f"the whole model of {name}, measured here", BASELINE)
    variants = build_variants(recipe, [BASELINE], {}, BASELINE)
    for mixer in dict.fromkeys(mixers):
        if mixer != BASELINE:
            try:
                variants.append(build_variants(recipe, [mixer], {}, BASELINE)[1])
            except ValueError as refusal:
                study.refused[mixer] = str(refusal)
    study.remarks += [f"{remark}." for variant in variants for remark in variant.remarks]
    plan = Plan(
        recipe=recipe.model_dump(mode="json"),
        data_dependent_model_config=recipe.task_class.expected_model_config(recipe.data),
        variants=tuple(variants),
        seeds=(),
        split="",
        lengths=tuple(lengths),
        tokens=max(lengths),
        looks=(rounds,),
    )
    possible, labels = sorted({shape_at(plan, length).length for length in lengths}), plan.labels
    per_length = len(labels) + 2  # the baseline twice, and timing
    for place, length in enumerate(possible):
        begun = 0

        def begin(what: str, place: int = place, length: int = length) -> None:
            nonlocal begun
            on_step(place * per_length + begun, len(possible) * per_length, f"{what} at {length:,} tokens")
            begun += 1

        alone = plan.model_copy(update={"tokens": length})
        _add_points(study, measure_length(alone, "full", length, labels, BASELINE, begin))
    return study


# ---------------------------------------------------------------------- stored


def read_stored(path: Path) -> dict[str, Result]:
    """The result of a result.json, or all results of a study.json, by the names of their files."""
    if path.name != STUDY:
        return {str(path): read_result(path)}
    found = read_study(path.parent).results(path.parent)
    return {str(path.parent / part.folder): result for part, result in found.items()}


def stored_costs(name: str, result: Result) -> CostStudy | None:
    """The costs in a stored result; None: it has too few lengths to predict from."""
    part = shown_part(result)
    study = CostStudy(f"the model of {name}", result.baseline, result=result)
    _add_points(study, [point for point in result.points(LengthPoint) if point.part == part])
    return study if len(study.lengths(study.baseline)) >= LEAST_LENGTHS else None


def _add_points(study: CostStudy, points: Sequence[LengthPoint]) -> None:
    for point in points:
        if point.control:
            continue
        if point.status != "done" or point.training is None or point.training_bytes is None:
            study.refused.setdefault(point.mechanism, str(point.reason))
            continue
        rounds = point.training.rounds or [point.training.median]
        seconds = tuple(value / 1000 / point.batch for value in rounds)
        found = Observation(point.length, seconds, point.training_bytes / point.batch)
        study.observations.setdefault(point.mechanism, []).append(found)
        study.fixed_bytes[point.mechanism] = TRAINING_COPIES * FLOAT_BYTES * (point.parameters or 0)
