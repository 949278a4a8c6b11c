"""What a section of the page is: a title, and from a result a table, a plot or text.

A section is one file in `sections/`, and its place in the list there is its place on the page. It says what it needs of
the result, and shows nothing where the result has none of it. HTML is written by jinja2 with autoescape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.compare.report.result import Result


@dataclass(frozen=True)
class Table:
    """Cells are text; the columns of `numeric` are aligned to the right. states: a word on the state of each row."""

    headers: list[str]
    rows: list[list[str]]
    numeric: list[int]
    states: list[str]


# ---------------------------------------------------------------------- plots


@dataclass(frozen=True)
class Axis:
    """ticks: where to put them; None: anywhere."""

    name: str
    unit: str = ""
    log: bool = False
    ticks: list[float] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class PlotPoint:
    """lines: what is shown when the reader points at it. hollow: its mark is not filled. dots: the y of single
    seeds.
    """

    x: float
    y: float
    lines: list[str]
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    dots: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Series:
    """The points of a mechanism, or of one of its runs.

    joined: they are joined to a curve; band: low and high are drawn as a band, otherwise as bars; last_mark_only: only
    the last point has a mark; failed: the curve ends in a cross.
    """

    mechanism: str
    name: str
    points: list[PlotPoint]
    joined: bool = True
    band: bool = False
    last_mark_only: bool = False
    failed: bool = False


@dataclass(frozen=True)
class ReferenceLine:
    """A dashed line that belongs to no mechanism, across the plot at the height y.

    end: with it, the line goes from the first point of the series to the last one, where it has this height.
    """

    name: str
    y: float
    end: float | None = None


@dataclass(frozen=True)
class View:
    """What a plot shows for one choice of its controls.

    label: of the plot, for people who hear it. front: names of series whose points a dashed line joins. names: whether
    they stand beside the end of a curve or beside a point. note: text below. lines: what the series are compared with.
    """

    label: str
    x: Axis
    y: Axis
    series: list[Series]
    front: list[str] = field(default_factory=list)
    names: Literal["end", "point"] = "end"
    note: str = ""
    lines: list[ReferenceLine] = field(default_factory=list)


@dataclass(frozen=True)
class Control:
    """A choice of the reader. label: what stands beside it; options: values with what people read, the chosen first."""

    name: str
    label: str
    options: list[tuple[str, str]]


@dataclass(frozen=True)
class Plot:
    """Views by the values that are chosen in the controls, joined by spaces."""

    controls: list[Control]
    views: dict[str, View]


# ---------------------------------------------------------------------- sections


@dataclass(frozen=True)
class Content:
    """What a section shows of a result. values: for its template; note: text below a plot or table."""

    table: Table | None = None
    plot: Plot | None = None
    note: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A section of the page.

    name        identifies its elements, and is the argument of `Result.table`
    place       "top", "plots", "tables" below these, or folded among the "details"
    content     what it shows of a result; None: the result has nothing for it
    table_title the title of its table among the details, for a section that is a plot
    template    the jinja2 source of its HTML; by default the plot or the table with its note
    """

    name: str
    title: str
    place: Literal["top", "plots", "tables", "details"]
    content: Callable[[Result], Content | None]
    table_title: str = ""
    template: str = ""


def states_of(items: Sequence[Any]) -> list[str]:
    return [item.status for item in items]
