"""The trials: their learning curves, and a table of all of them."""

import statistics
from collections.abc import Sequence
from typing import Literal

from subquad.compare.records import CurvePoint, Trial
from subquad.compare.report.fairness import why_times_differ
from subquad.compare.report.formatting import (
    NOTHING,
    format_bytes,
    format_metric,
    format_number,
    format_quantity,
    format_seeds,
    format_setting,
)
from subquad.compare.report.learning import floor_lines
from subquad.compare.report.result import Result
from subquad.compare.report.section import (
    Axis,
    Content,
    Control,
    Plot,
    PlotPoint,
    Section,
    Series,
    Table,
    View,
    states_of,
)

Value = Literal["value", "loss"]
By = Literal["update", "seconds"]
NOTE = (
    "Lines are means over seeds, bands reach from the lowest to the highest seed. A dashed line that ends in a cross "
    "is a run that failed."
)


def content(result: Result) -> Content | None:
    return Content(trials_table(result), _plot(result), NOTE) if result.trials else None


# ---------------------------------------------------------------------- plot


def _plot(result: Result) -> Plot | None:
    points = [point for trial in result.trials for point in trial.curve]
    values: dict[Value, str] = {"value": result.metric.name, "loss": "Loss"}
    axes: dict[By, str] = {"update": "Update", "seconds": "Wall clock"}
    values = {key: name for key, name in values.items() if any(getattr(point, key) is not None for point in points)}
    axes = {key: name for key, name in axes.items() if any(getattr(point, key) is not None for point in points)}
    if why_times_differ(result) is not None:
        axes.pop("seconds", None)
    if not values:
        return None
    return Plot(
        [Control("value", "Value", [*values.items()]), Control("by", "By", [*axes.items()])],
        {f"{value} {by}": _view(result, value, by) for value in values for by in axes},
    )


def _view(result: Result, value: Value, by: By) -> View:
    metric = result.metric
    name, unit = (metric.name, metric.unit) if value == "value" else ("validation loss", "")
    series = []
    for label in result.labels:
        done, failed = result.trials_of(label), result.trials_of(label, "failed")
        series.append(Series(label, label, _mean_curve(done, value, by, name), band=True, last_mark_only=True))
        for trial in failed:
            points = [
                _failed_point(trial, point, value, by, name) for point in trial.curve if _is_known(point, value, by)
            ]
            series.append(Series(label, f"{label}, seed {trial.seed} (failed)", points, failed=True))
    return View(
        label=f"{name} by {'update' if by == 'update' else 'training time'}",
        x=Axis("updates →" if by == "update" else "minutes of training →", from_zero=True),
        y=Axis(f"{name} on validation data", unit),
        series=series,
        lines=floor_lines(result) if value == "value" else [],
    )


def _is_known(point: CurvePoint | None, value: Value, by: By) -> bool:
    return point is not None and getattr(point, value) is not None and getattr(point, by) is not None


def _failed_point(trial: Trial, point: CurvePoint, value: Value, by: By, name: str) -> PlotPoint:
    shown = format_quantity(getattr(point, value), digits=4)
    lines = [f"{name} {shown} at update {format_number(point.update)}", str(trial.reason)]
    return PlotPoint(_place(point, by), getattr(point, value), lines)


def _place(point: CurvePoint, by: By) -> float:
    return point.update if by == "update" else (point.seconds or 0.0) / 60


def _mean_curve(trials: Sequence[Trial], value: Value, by: By, name: str) -> list[PlotPoint]:
    """Mean, lowest and highest of the seeds at every update that all of them have."""
    curves = [{point.update: point for point in trial.curve} for trial in trials]
    if not curves:
        return []
    updates = [update for update in curves[0] if all(_is_known(curve.get(update), value, by) for curve in curves)]
    points = []
    for update in sorted(updates):
        values = [getattr(curve[update], value) for curve in curves]
        x = statistics.fmean(_place(curve[update], by) for curve in curves)
        lines = [f"{name} {format_quantity(statistics.fmean(values), digits=4)}", f"update {format_number(update)}"]
        if by == "seconds":
            lines[1] += f", {format_quantity(x, 'minutes')}"
        if len(values) > 1:
            spread = f"{format_quantity(min(values), digits=4)} to {format_quantity(max(values), digits=4)}"
            lines.append(f"{format_seeds(len(values))}, {spread}")
        points.append(PlotPoint(x, statistics.fmean(values), lines, min(values), max(values)))
    return points


# ---------------------------------------------------------------------- table


def trials_table(result: Result) -> Table:
    headers = ["mechanism", "seed", result.metric.name, "training s", "peak memory", "folder", "setting", "state"]
    rows = [_row(result, trial) for trial in result.trials]
    return Table(headers, rows, [1, 2, 3, 4], states_of(result.trials))


def _row(result: Result, trial: Trial) -> list[str]:
    score = trial.scores.get(result.metric.name)
    return [
        trial.mechanism,
        str(trial.seed),
        NOTHING if score is None else format_metric(result.metric, score.value),
        NOTHING if trial.training_seconds is None else format_number(trial.training_seconds),
        NOTHING if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
        trial.run or NOTHING,
        format_setting(trial.setting),
        f"{trial.status}: {trial.reason}" if trial.reason else trial.status,
    ]


SECTION = Section("trials", "Learning curves", "plots", content, table_title="Every run")
