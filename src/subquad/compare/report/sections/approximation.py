"""The distance from exact attention, against the time relative to it."""

from subquad.compare.measure.approximation import ApproximationPoint
from subquad.compare.report.formatting import format_number, format_quantity, format_setting
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

SOURCES = {"trained": "Trained", "random": "Random"}
NOTE = "Relative L2 distance from exact softmax attention on the same queries, keys and values."


def content(result: Result) -> Content | None:
    points = [point for point in result.points(ApproximationPoint) if point.status == "done"]
    if not points:
        return None
    sources = {key: name for key, name in SOURCES.items() if any(point.source == key for point in points)}
    views = {source: _view(result, [point for point in points if point.source == source]) for source in sources}
    plot = Plot([Control("source", "Activations", [*sources.items()])], views)
    return Content(_table(points), plot, NOTE)


def _view(result: Result, points: list[ApproximationPoint]) -> View:
    series = []
    for label in result.labels:
        own = sorted((_point(point) for point in points if point.mechanism == label), key=lambda point: point.x)
        if own:
            series.append(Series(label, label, own))
    return View(
        label="Distance from exact attention against relative time",
        x=Axis("time relative to exact attention →", log=True),
        y=Axis("relative error (lower is better)", log=True),
        series=series,
    )


def _point(point: ApproximationPoint) -> PlotPoint:
    assert point.cost is not None
    assert point.error is not None
    about = [point.option, f"{format_number(point.length or 0)} tokens"]
    if point.setting:
        about.append(format_setting(point.setting))
    lines = [
        f"error {format_quantity(point.error)}",
        f"{format_quantity(point.cost)} of the time of exact attention",
        ", ".join(filter(None, about)),
    ]
    return PlotPoint(point.cost, point.error, lines)


def _table(points: list[ApproximationPoint]) -> Table:
    headers = ["mechanism", "option", "activations", "length", "relative error", "relative time", "setting"]
    rows = [
        [
            point.mechanism,
            point.option,
            str(point.source),
            format_number(point.length or 0),
            f"{point.error:.3g}",
            f"{point.cost:.3g}",
            format_setting(point.setting),
        ]
        for point in points
    ]
    return Table(headers, rows, [3, 4, 5], states_of(points))


SECTION = Section(
    "approximation",
    "Distance from exact attention",
    "plots",
    content,
    table_title="Every distance from exact attention",
)
