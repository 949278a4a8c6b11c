"""The validation loss of the trained baseline with each mechanism swapped in, before and after a short adaptation."""

from subquad.compare.measure.swap import SwapPoint, SwapReference
from subquad.compare.report.formatting import NOTHING, format_count, format_number, format_setting
from subquad.compare.report.result import Result
from subquad.compare.report.section import (
    Axis,
    Content,
    Plot,
    PlotPoint,
    ReferenceLine,
    Section,
    Series,
    Table,
    View,
    states_of,
)

DIGITS = 3
MEANING = (
    "The mechanism takes the place of the mixers of the trained baseline, whose other weights stay; so do the "
    "projections to queries, keys and values where the mechanism has them. The loss on validation data is in nats for "
    "each target. A mechanism that is no better than no mixing has carried nothing over. The mean of the values is the "
    "baseline with equal attention to all tokens. All this tells how far a trained model can go on with the mechanism, "
    "and is not its quality after a whole training, which the trials show."
)


def content(result: Result) -> Content | None:
    points = [point for point in result.points(SwapPoint) if point.loss_before is not None]
    if not points:
        return None
    references = [reference for point in points for reference in point.references]
    missing = [f"There is no {one.name}: {one.reason}." for one in references if one.reason is not None]
    return Content(_table(points, references), _plot(result, points, references), " ".join([MEANING, *missing]))


def _plot(result: Result, points: list[SwapPoint], references: list[SwapReference]) -> Plot:
    """Curves from the swap to the end of the adaptation, with the references as lines."""
    updates = max((point.updates or 0 for point in points), default=0)
    by_label = {point.mechanism: point for point in points}
    series = [Series(label, label, _curve(by_label[label])) for label in result.labels if label in by_label]
    lines = [ReferenceLine(one.name, one.loss_before, one.loss_after) for one in references if one.loss_before]
    if points[0].baseline_loss is not None:
        lines.insert(0, ReferenceLine(f"{result.baseline} as it was trained", points[0].baseline_loss))
    view = View(
        label="Validation loss after a mechanism was swapped into the trained baseline",
        x=Axis("updates after the swap", ticks=[0, updates]),
        y=Axis("validation loss (lower is better)"),
        series=series,
        lines=lines,
    )
    return Plot([], {"": view})


def _curve(point: SwapPoint) -> list[PlotPoint]:
    assert point.loss_before is not None
    about = [] if point.new_parameters is None else [f"{format_count(point.new_parameters)} parameters are new"]
    curve = [PlotPoint(0, point.loss_before, [f"loss {format_number(point.loss_before, DIGITS)}, untrained", *about])]
    if point.loss_after is not None and point.updates:
        shown = f"loss {format_number(point.loss_after, DIGITS)} after {point.updates} updates"
        curve.append(PlotPoint(point.updates, point.loss_after, [shown, *about]))
    return curve


def _table(points: list[SwapPoint], references: list[SwapReference]) -> Table:
    """A row for every mechanism, then one for every reference."""
    base = points[0].baseline_loss
    updates = next((point.updates for point in points if point.updates), 0)
    adapted = f"after {updates} updates"
    headers = ["mechanism", "untrained loss", "change", f"loss {adapted}", "change", "new parameters", "setting"]
    rows = [
        [
            point.mechanism,
            *_loss_cells(point.loss_before, base),
            *_loss_cells(point.loss_after, base),
            NOTHING if point.new_parameters is None else format_count(point.new_parameters),
            format_setting(point.setting),
        ]
        for point in points
    ]
    rows += [
        [one.name, *_loss_cells(one.loss_before, base), *_loss_cells(one.loss_after, base), "0", one.reason or NOTHING]
        for one in references
    ]
    return Table(headers, rows, [1, 2, 3, 4, 5], [*states_of(points), *("reference" for _ in references)])


def _loss_cells(loss: float | None, base: float | None) -> list[str]:
    """The loss, and its change against the trained baseline."""
    if loss is None:
        return [NOTHING, NOTHING]
    change = NOTHING if base is None else format_number(loss - base, DIGITS, sign=True)
    return [format_number(loss, DIGITS), change]


SECTION = Section(
    "swap",
    "Swapped into the trained baseline",
    "plots",
    content,
    table_title="Every loss after a swap into the trained baseline",
)
