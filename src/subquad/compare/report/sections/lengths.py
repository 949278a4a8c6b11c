"""Time, memory and FLOPs by the length of the sequences."""

from subquad.compare.measure.lengths import PART_TITLES, LengthPoint, Part, Timing
from subquad.compare.report.formatting import NOTHING, format_bytes, format_number, format_quantity, format_setting
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
from subquad.compare.report.speed import shown_part

COSTS = {
    "training": ("training time of a batch", "ms"),
    "inference": ("inference time of a batch", "ms"),
    "training_bytes": ("peak memory of training", "bytes"),
    "inference_bytes": ("peak memory of inference", "bytes"),
    "flops": ("FLOPs of a forward pass", "FLOPs"),
}


def content(result: Result) -> Content | None:
    points = result.points(LengthPoint)
    if not points:
        return None
    return Content(lengths_table(points), _plot(result, points))


# ---------------------------------------------------------------------- plot


def _plot(result: Result, points: list[LengthPoint]) -> Plot | None:
    costs = [key for key in COSTS if any(getattr(point, key) is not None for point in points)]
    if not costs:
        return None
    first = shown_part(result)
    parts = [first, *(part for part in PART_TITLES if part != first and any(point.part == part for point in points))]
    return Plot(
        [
            Control("cost", "Cost", [(key, COSTS[key][0][0].upper() + COSTS[key][0][1:]) for key in costs]),
            Control("part", "Part", [(part, PART_TITLES[part].capitalize()) for part in parts]),
        ],
        {f"{key} {part}": _view(result, key, part) for key in costs for part in parts},
    )


def _view(result: Result, key: str, part: Part) -> View:
    name, unit = COSTS[key]
    known = {label: list(result.lengths_of(label, part).values()) for label in result.competitors}
    known = {label: [point for point in points if getattr(point, key) is not None] for label, points in known.items()}
    lengths = sorted({point.length for points in known.values() for point in points})
    return View(
        label=f"{name} by sequence length",
        x=Axis("tokens in a sequence →", log=True, ticks=[float(length) for length in lengths]),
        y=Axis(name, unit, log=True),
        series=[
            Series(label, label, [_point(point, key, unit) for point in points]) for label, points in known.items()
        ],
        note=_note(result, part),
    )


def _point(point: LengthPoint, key: str, unit: str) -> PlotPoint:
    value = getattr(point, key)
    lines = ["", f"{format_number(point.length)} tokens, batch of {point.batch}"]
    if point.setting:
        lines.append(format_setting(point.setting))
    if not isinstance(value, Timing):
        lines[0] = format_quantity(value, unit)
        return PlotPoint(point.length, value, lines)
    low, high = format_quantity(value.low, unit), format_quantity(value.high, unit)
    lines[0] = f"{format_quantity(value.median, unit)} ({low} to {high}, {len(value.rounds)} rounds)"
    return PlotPoint(point.length, value.median, lines, value.low, value.high)


def _note(result: Result, part: Part) -> str:
    points = [point for point in result.points(LengthPoint) if point.part == part]
    texts = ["Both axes are logarithmic. Bars are quartiles of the rounds.", *_own_lengths(result)]
    budgets = {point.batch * point.length for point in points if point.length not in result.task_lengths}
    if len(budgets) == 1:
        texts.append(f"At the other lengths every batch holds about {format_number(budgets.pop())} tokens.")
    texts += [
        f"{point.mechanism} at {format_number(point.length)} tokens: {point.status}, {point.reason}."
        for point in points
        if point.status != "done"
    ]
    return " ".join(texts)


def _own_lengths(result: Result) -> list[str]:
    """The lengths of the task, which are the only ones at which quality is known."""
    if not result.task_lengths:
        return []
    middle, *longer = [format_number(length) for length in result.task_lengths]
    own = f"median {middle}, 95th percentile {longer[0]}" if longer else middle
    return [
        f"The task's own samples have {own} tokens, with batches as in training. Elsewhere: cost only, quality was "
        "not measured there."
    ]


# ---------------------------------------------------------------------- table


def lengths_table(points: list[LengthPoint]) -> Table:
    headers = ["mechanism", "part", "length", "batch", "training ms", "inference ms", "training memory"]
    headers += ["inference memory", "GFLOPs", "setting", "state"]
    rows = [
        [
            f"{point.mechanism} (control)" if point.control else point.mechanism,
            point.part,
            format_number(point.length),
            format_number(point.batch),
            _timing(point.training),
            _timing(point.inference),
            NOTHING if point.training_bytes is None else format_bytes(point.training_bytes),
            NOTHING if point.inference_bytes is None else format_bytes(point.inference_bytes),
            NOTHING if point.flops is None else format_number(point.flops / 1e9, 2),
            format_setting(point.setting),
            f"{point.status}: {point.reason}" if point.reason else point.status,
        ]
        for point in points
    ]
    return Table(headers, rows, list(range(2, 9)), states_of(points))


def _timing(timing: Timing | None) -> str:
    """ "12.3 (12.1 to 12.9)"."""
    if timing is None:
        return NOTHING
    return f"{format_number(timing.median, 1)} ({format_number(timing.low, 1)} to {format_number(timing.high, 1)})"


SECTION = Section("lengths", "Cost by length", "plots", content, table_title="Every length")
