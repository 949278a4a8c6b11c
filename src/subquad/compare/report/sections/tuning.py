"""The search for the settings of every mechanism: what was tried and chosen, and what the learning rate matters."""

from collections.abc import Sequence
from typing import Any

from subquad.compare.records import Tuning, TuningTrial
from subquad.compare.report.formatting import NOTHING, format_quantity
from subquad.compare.report.result import Result
from subquad.compare.report.section import Axis, Content, Plot, PlotPoint, Section, Series, Table, View

RATE = "schedule.lr"


def content(result: Result) -> Content | None:
    if not result.tuning:
        return None
    rows = [_row(search) for search in result.tuning]
    headers = ["mechanism", "trials", "updates", f"best validation {result.tuning[0].metric}", "chosen settings"]
    table = Table([*headers, "best at the edge of what was tried"], rows, [1, 2, 3], ["done"] * len(rows))
    return Content(table, _plot(result.tuning), _note(result.tuning))


def _row(search: Tuning) -> list[str]:
    counts = {status: sum(trial.status == status for trial in search.trials) for status in ("stopped", "failed")}
    ended = [f"{count} {status}" for status, count in counts.items() if count]
    done = _best([trial for trial in search.trials if trial.status == "done"], search.better)
    return [
        search.mechanism,
        f"{len(search.trials)}" + (f" ({', '.join(ended)})" if ended else ""),
        f"{sum(trial.updates for trial in search.trials):,}",
        NOTHING if done is None else format_quantity(done, digits=4),
        describe_settings(search.chosen) or "as given: no trial came to its end",
        ", ".join(search.edges) or NOTHING,
    ]


def _best(trials: Sequence[TuningTrial], better: str) -> float | None:
    values = [trial.value for trial in trials if trial.value is not None]
    return (max if better == "higher" else min)(values, default=None)


def describe_settings(settings: dict[str, Any]) -> str:
    """ "schedule.lr=0.0031 window=32"."""
    return " ".join(
        f"{name}={format_quantity(value, digits=3) if isinstance(value, float) else value}"
        for name, value in settings.items()
    )


def _plot(searches: Sequence[Tuning]) -> Plot | None:
    """The best validation by the learning rate; trials that were stopped have a hollow mark."""
    series = []
    for search in searches:
        tried = [trial for trial in search.trials if trial.value is not None and RATE in trial.settings]
        points = [
            PlotPoint(
                trial.settings[RATE],
                trial.value,
                [f"{search.metric} {trial.value:.4g}", describe_settings(trial.settings), trial.status],
                hollow=trial.status != "done",
            )
            for trial in sorted(tried, key=lambda trial: trial.settings[RATE])
            if trial.value is not None
        ]
        if points:
            series.append(Series(search.mechanism, search.mechanism, points, joined=False))
    if not series:
        return None
    first = searches[0]
    axis = Axis(f"best validation {first.metric}")
    view = View(f"Validation {first.metric} by learning rate", Axis("learning rate", log=True), axis, series)
    return Plot([], {"": view})


def _note(searches: Sequence[Tuning]) -> str:
    most = max(len(search.trials) for search in searches)
    names = dict.fromkeys(name for search in searches for trial in search.trials for name in trial.settings)
    return (
        f"Every mechanism had up to {most} trials over {', '.join(names)}, as far as it has them, on validation data "
        "alone, with another seed than the trials that are compared. A training that was not in the best third after a "
        "ninth or a third of its validations was stopped (hollow marks). Where the best value is the last that was "
        "tried, a better one may lie beyond."
    )


SECTION = Section("tuning", "Tuning", "plots", content, table_title="Settings that tuning chose")
