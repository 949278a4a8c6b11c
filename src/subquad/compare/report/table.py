"""A result in short: the table that the terminal and the page show, and the cost axes of the Pareto plot."""

from dataclasses import dataclass

from subquad.compare.report.conclusions import shown_length, shown_part
from subquad.compare.report.formatting import (
    format_bytes,
    format_count,
    format_crossover,
    format_estimate,
    format_metric,
    format_number,
    format_p,
)
from subquad.compare.report.schema import Result
from subquad.compare.report.statistics import (
    TrialNumber,
    crossover,
    differences,
    parameters,
    pareto,
    quality,
    timing,
    trial_mean,
)

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Cells are text; the columns of `numeric` are aligned to the right. marks: a word on the state of each row."""

    headers: list[str]
    rows: list[list[str]]
    numeric: list[int]
    marks: list[str]


def table(result: Result) -> Table:
    """One row for each mechanism. Columns that nobody has a number for are left out."""
    metric, found = result.metric, differences(result)
    headers = ["mechanism", f"{metric.name} (95% interval)", f"Δ {result.baseline}", "p", "parameters", "training time"]
    headers += ["tokens/s", "peak memory", "decoded tokens/s", "faster from", "runs"]
    rows = []
    for label in result.labels:
        difference = found.get(label)
        peak = trial_mean(result, label, "peak_bytes")
        rows.append(
            [
                label,
                format_estimate(metric, quality(result, label)),
                format_metric(metric, difference.mean, sign=True) if difference else NOTHING,
                format_p(difference.p).removeprefix("p ").removeprefix("= ") if difference else NOTHING,
                NOTHING if (count := parameters(result, label)) is None else format_count(count),
                NOTHING if (time := trial_mean(result, label, "training_seconds")) is None else f"{_count(time)} s",
                _count(trial_mean(result, label, "tokens_per_second")),
                NOTHING if peak is None else format_bytes(peak),
                _count(trial_mean(result, label, "decoded_per_second")),
                NOTHING if label == result.baseline else _overtakes(result, label),
                _state(result, label),
            ]
        )
    last = len(headers) - 1
    known = [i for i in range(len(headers)) if i in (0, last) or any(row[i] != NOTHING for row in rows)]
    return Table(
        headers=[headers[i] for i in known],
        rows=[[row[i] for i in known] for row in rows],
        numeric=list(range(1, len(known) - 1)),
        marks=[_mark(result, label) for label in result.labels],
    )


def _overtakes(result: Result, label: str) -> str:
    return format_crossover(crossover(result, label, shown_part(result), "training"))


def _count(value: float | None) -> str:
    return NOTHING if value is None else format_number(value, 0 if value >= 100 else 1)


def _mark(result: Result, label: str) -> str:
    """ "failed" where a run failed, "missing" where one is, otherwise "done"."""
    states = {trial.status for trial in result.trials if trial.mechanism == label}
    return next((state for state in ("failed", "missing") if state in states), "done")


def _state(result: Result, label: str) -> str:
    """ "3 done", or "2 done, 1 failed"."""
    trials = [trial.status for trial in result.trials if trial.mechanism == label]
    counts = [f"{trials.count(status)} {status}" for status in ("done", "failed", "missing") if status in trials]
    return ", ".join(counts) or NOTHING


@dataclass(frozen=True)
class CostAxis:
    """One way to count cost. values: by label; front: the labels that no other beats in cost and quality together."""

    name: str
    unit: str
    values: dict[str, float]
    front: list[str]


def cost_axes(result: Result) -> list[CostAxis]:
    """The costs that two mechanisms or more have a number for, the most telling first."""
    candidates: list[tuple[str, str, dict[str, float | None]]] = []
    part = shown_part(result)
    length = shown_length(result, part)
    if length is not None:
        points = {label: result.lengths_of(label, part).get(length) for label in result.labels}
        done = {label: point for label, point in points.items() if point is not None and point.status == "done"}
        at = f"at {format_number(length)} tokens"
        for work in ("training", "inference"):
            times = {label: timing(point, work) for label, point in done.items()}
            medians = {label: None if time is None else time.median for label, time in times.items()}
            candidates.append((f"{work} time {at}", "ms", dict(medians)))
        candidates.append((f"training memory {at}", "bytes", {k: point.training_bytes for k, point in done.items()}))
        candidates.append((f"FLOPs of a forward pass {at}", "FLOPs", {k: point.flops for k, point in done.items()}))
    of_runs: tuple[tuple[str, str, TrialNumber], ...] = (
        ("time of the whole training", "s", "training_seconds"),
        ("peak memory of training", "bytes", "peak_bytes"),
        ("parameters", "", "parameters"),
    )
    for name, unit, field in of_runs:
        candidates.append((name, unit, {label: trial_mean(result, label, field) for label in result.labels}))
    return [axis for name, unit, values in candidates if (axis := _axis(result, name, unit, values)) is not None]


def _axis(result: Result, name: str, unit: str, values: dict[str, float | None]) -> CostAxis | None:
    scores = {label: quality(result, label) for label in result.labels}
    points = {
        label: (float(value), score.mean)
        for label, value in values.items()
        if value is not None and (score := scores[label]) is not None
    }
    if len(points) < 2:
        return None
    costs = {label: cost for label, (cost, _) in points.items()}
    return CostAxis(name, unit, costs, pareto(points, result.metric.better))
