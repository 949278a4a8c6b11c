"""What a mechanism has learned after some minutes of training: a slower one gets fewer updates in them."""

import statistics

from subquad.compare.records import Trial
from subquad.compare.report.fairness import why_times_differ
from subquad.compare.report.formatting import NOTHING, format_metric, format_quantity
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table

SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 72000, 144000, 360000)
COLUMNS = 4


def content(result: Result) -> Content | None:
    curves = [
        trial for trial in result.trials if trial.status == "done" and any(point.seconds for point in trial.curve)
    ]
    if not curves or why_times_differ(result) is not None:
        return None
    has_values = any(point.value is not None for trial in curves for point in trial.curve)
    field, name = ("value", result.metric.name) if has_values else ("loss", "validation loss")
    longest = max(point.seconds or 0.0 for trial in curves for point in trial.curve)
    times = [seconds for seconds in SECONDS if seconds <= longest][-COLUMNS:]
    if not times:
        return None
    labels = [label for label in result.labels if any(trial.mechanism == label for trial in curves)]
    rows = [[label, *(_shown(result, label, field, seconds) for seconds in times)] for label in labels]
    headers = ["mechanism", *(f"after {_duration(seconds)}" for seconds in times)]
    note = (
        f"The mean {name} over seeds of the last validation before that time; a training that had ended by then "
        "keeps its last. Times are of the machine that trained, with whatever else it did."
    )
    return Content(Table(headers, rows, list(range(1, len(headers))), ["done"] * len(rows)), note=note)


def _shown(result: Result, label: str, field: str, seconds: float) -> str:
    found = [_reached(trial, field, seconds) for trial in result.trials_of(label)]
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return NOTHING
    mean = statistics.fmean(known)
    return format_metric(result.metric, mean) if field == "value" else format_quantity(mean, digits=4)


def _reached(trial: Trial, field: str, seconds: float) -> float | None:
    before = [point for point in trial.curve if point.seconds is not None and point.seconds <= seconds]
    known = [value for point in before if (value := getattr(point, field)) is not None]
    return known[-1] if known else None


def _duration(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 3600 else f"{seconds // 3600} h"


SECTION = Section("by_time", "Quality by time", "tables", content)
