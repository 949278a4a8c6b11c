"""Quality against cost, for every way to count costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from subquad.compare.measure.costs import PASSES
from subquad.compare.report.fairness import TrialNumber, trial_mean, why_times_differ
from subquad.compare.report.formatting import format_number, format_quantity, format_seeds
from subquad.compare.report.learning import floor_lines
from subquad.compare.report.quality import quality
from subquad.compare.report.result import Result
from subquad.compare.report.section import Axis, Content, Control, Plot, PlotPoint, Section, Series, View
from subquad.compare.report.speed import shown_part, task_length, timing
from subquad.compare.statistics.scores import Estimate

NOTE = (
    "Filled marks are on the Pareto line: no other mechanism is both cheaper and better. Dots are single seeds. Bars "
    "are 95% intervals of the mean; marks whose bars overlap may change places in another run. Lines are floors. "
    "Times and memory are at the length of the task's own samples, where quality was measured."
)


@dataclass(frozen=True)
class CostAxis:
    """One way to count cost. values: by label; front: the labels that no other beats in cost and quality together."""

    name: str
    unit: str
    values: dict[str, float]
    front: list[str]


def content(result: Result) -> Content | None:
    axes = cost_axes(result)
    if not axes:
        return None
    control = Control("cost", "Cost", [(str(i), axis.name[0].upper() + axis.name[1:]) for i, axis in enumerate(axes)])
    return Content(plot=Plot([control], {str(i): _view(result, axis) for i, axis in enumerate(axes)}), note=NOTE)


def _view(result: Result, axis: CostAxis) -> View:
    metric, costs = result.metric, axis.values.values()
    return View(
        label=f"{metric.name} against {axis.name}",
        x=Axis(f"{axis.name} →", axis.unit, log=max(costs) > 3 * min(costs)),
        y=Axis(f"{metric.name} ({metric.better} is better)", metric.unit),
        series=[Series(label, label, [_point(result, axis, label)], joined=False) for label in axis.values],
        front=axis.front,
        names="point",
        lines=floor_lines(result),
    )


def _point(result: Result, axis: CostAxis, label: str) -> PlotPoint:
    metric, estimate = result.metric, quality(result, label)
    assert estimate is not None, "a cost axis holds mechanisms with a score"
    lines = [
        f"{format_number(estimate.mean, metric.digits)}{metric.unit} {metric.name}",
        f"{format_quantity(axis.values[label], axis.unit)}, {axis.name}",
        f"{_interval(estimate, metric.digits)}, {format_seeds(estimate.seeds)}",
    ]
    hollow = label not in axis.front
    name = metric.name
    seeds = [trial.scores[name].value for trial in result.trials_of(label) if name in trial.scores]
    dots = seeds if len(seeds) > 1 else []
    return PlotPoint(axis.values[label], estimate.mean, lines, estimate.low, estimate.high, hollow, dots)


def _interval(estimate: Estimate, digits: int) -> str:
    return f"95% interval {format_number(estimate.low, digits)} to {format_number(estimate.high, digits)}"


# ---------------------------------------------------------------------- costs


def cost_axes(result: Result) -> list[CostAxis]:
    """The costs that two mechanisms or more have a number for, the most important first."""
    candidates: list[tuple[str, str, dict[str, float | None]]] = []
    part = shown_part(result)
    length = task_length(result)
    if length is not None:
        points = {label: result.lengths_of(label, part).get(length) for label in result.competitors}
        done = {label: point for label, point in points.items() if point is not None and point.status == "done"}
        at = f"at {format_number(length)} tokens"
        for kind in reversed(PASSES):
            times = {label: timing(point, kind) for label, point in done.items()}
            medians = {label: None if time is None else time.median for label, time in times.items()}
            candidates.append((f"{kind} time {at}", "ms", dict(medians)))
        candidates.append((f"training memory {at}", "bytes", {k: point.training_bytes for k, point in done.items()}))
        candidates.append((f"FLOPs of a forward pass {at}", "FLOPs", {k: point.flops for k, point in done.items()}))
    of_trials: tuple[tuple[str, str, TrialNumber], ...] = (
        ("time of the whole training", "s", "training_seconds"),
        ("peak memory of training", "bytes", "peak_bytes"),
        ("parameters", "", "parameters"),
    )
    for name, unit, field in of_trials if why_times_differ(result) is None else of_trials[1:]:
        candidates.append((name, unit, {label: trial_mean(result, label, field) for label in result.competitors}))
    return [axis for name, unit, values in candidates if (axis := _axis(result, name, unit, values)) is not None]


def _axis(result: Result, name: str, unit: str, values: dict[str, float | None]) -> CostAxis | None:
    scores = {label: quality(result, label) for label in result.competitors}
    points = {
        label: (float(value), score.mean)
        for label, value in values.items()
        if value is not None and (score := scores[label]) is not None
    }
    if len(points) < 2:
        return None
    costs = {label: cost for label, (cost, _) in points.items()}
    return CostAxis(name, unit, costs, pareto(points, result.metric.better))


def pareto(points: Mapping[str, tuple[float, float]], better: Literal["higher", "lower"]) -> list[str]:
    """Labels of the (cost, quality) that no other point beats in one without losing in the other; cheapest first."""
    sign = 1 if better == "higher" else -1
    gains = {label: (-cost, sign * value) for label, (cost, value) in points.items()}
    beaten = {
        label
        for label, (saving, value) in gains.items()
        if any(s >= saving and v >= value and (s, v) != (saving, value) for s, v in gains.values())
    }
    return sorted(points.keys() - beaten, key=lambda label: points[label])


SECTION = Section("pareto", "Quality against cost", "plots", content)
