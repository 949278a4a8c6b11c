"""Sections of the page: a new one is one file and one entry in the list, and every one has its rows for a program."""

import pytest

from subquad.compare.measure.swap import SwapPoint, SwapReference
from subquad.compare.records import PositionLoss
from subquad.compare.report import sections
from subquad.compare.report.fairness import why_times_differ
from subquad.compare.report.formatting import format_quantity
from subquad.compare.report.html import page
from subquad.compare.report.result import Result
from subquad.compare.report.section import Axis, Content, Plot, PlotPoint, Section, Series, Table, View
from tests.compare.cases import synthetic
from tests.compare.report.results import bare


def toy_content(result: Result) -> Content | None:
    if not result.trials:
        return None
    rows = [[label, str(len(label))] for label in result.labels]
    series = [Series(label, label, [PlotPoint(1, len(label), ["<b>"])]) for label in result.labels]
    view = View("letters by mechanism", Axis("one"), Axis("letters"), series)
    return Content(Table(["label", "letters"], rows, [1], ["done"] * len(rows)), Plot([], {"": view}), "A toy <note>.")


TOY = Section("toy", "Letters & more", "plots", toy_content, table_title="Every letter")


def test_a_section_is_shown_where_its_result_has_something_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SECTIONS", (*sections.SECTIONS[:2], TOY, *sections.SECTIONS[2:]))
    shown = page(synthetic())
    assert '<h2 id="toy-title">Letters &amp; more</h2>' in shown
    assert "A toy &lt;note&gt;." in shown
    assert "<summary>Every letter</summary>" in shown
    assert shown.index('id="mechanisms-title"') < shown.index('id="toy-title"') < shown.index('id="pareto-title"')
    assert synthetic().table("toy").rows[0] == ["softmax", "7"]
    assert "toy-title" not in page(bare())


@pytest.mark.parametrize("name", ["mechanisms", "lengths", "trials", "swap", "epochs", "environment"])
def test_the_rows_of_a_section(name: str) -> None:
    table = synthetic().table(name)
    assert table.rows
    assert all(len(row) == len(table.headers) for row in table.rows)
    assert len(table.states) == len(table.rows)
    assert all(column < len(table.headers) for column in table.numeric)


@pytest.mark.parametrize("machines", [("a", "b"), ("a", "a, b")], ids=["two", "one training went on elsewhere"])
def test_times_of_trainings_on_several_machines_are_not_compared(machines: tuple[str, str]) -> None:
    result = synthetic()
    times = {"training time", "peak memory"}
    assert times <= set(result.table("mechanisms").headers)
    for trial in result.trials:
        trial.setting = trial.setting | {"machine": machines[0]}
    assert times <= set(result.table("mechanisms").headers)
    assert "minutes of training" in page(result)
    result.trials[0].setting = result.trials[0].setting | {"machine": machines[1]}
    assert times & set(result.table("mechanisms").headers) == {"peak memory"}
    for name in ("epochs", "by_time"):
        with pytest.raises(ValueError, match="has no table"):
            result.table(name)
    assert "minutes of training" not in page(result)
    assert "time of the whole training" not in page(result)


def test_times_of_trainings_that_ran_at_once_are_not_compared() -> None:
    result = synthetic()
    for number, trial in enumerate(result.trials):
        trial.training_spans = [(10.0 * number, 10.0 * number + 9)]
    assert why_times_differ(result) is None
    result.trials[1].training_spans = [(5.0, 9.0), (20.5, 21.0)]
    assert "at once" in str(why_times_differ(result))
    assert "training time" not in result.table("mechanisms").headers


def test_what_has_no_rows_is_said() -> None:
    with pytest.raises(ValueError, match="there is no section 'length'; did you mean 'lengths'"):
        synthetic().table("length")
    with pytest.raises(ValueError, match="the section recipe of this result has no table"):
        synthetic().table("recipe")
    with pytest.raises(ValueError, match="the section lengths of this result has no table"):
        bare().table("lengths")


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1234, "ms", "1.23 s"),
        (12.34, "ms", "12.3 ms"),
        (2**31, "bytes", "2.0 GiB"),
        (2.5e9, "FLOPs", "2.50 GFLOPs"),
    ],
)
def test_quantities(value: float, unit: str, shown: str) -> None:
    assert format_quantity(value, unit) == shown


def test_a_swap_is_shown_beside_its_references() -> None:
    table = synthetic().table("swap")
    rows = {row[0]: row[1:5] for row in table.rows}
    assert rows["softmax"] == ["1.700", "+0.000", "1.700", "+0.000"]
    assert rows["no mixing"] == ["6.200", "+4.500", "4.100", "+2.400"]
    assert table.states[-2:] == ["reference", "reference"]
    result = synthetic(labels=("lightconv", "eva"))
    (point,) = [point for point in result.points(SwapPoint) if point.references]
    point.references[1] = SwapReference(name="mean of the values", reason="the baseline has lightconv")
    assert "There is no mean of the values: the baseline has lightconv." in page(result)


def with_losses(*losses: tuple[str, int, float]) -> Result:
    """A comparison of language models: losses of mechanisms and seeds at the position 0, half of them at 1 to 3."""
    result = synthetic(seeds=2, labels=("softmax", "lightconv"))
    for label, seed, loss in losses:
        trial = next(trial for trial in result.trials if (trial.mechanism, trial.seed) == (label, seed))
        trial.loss_by_position = [
            PositionLoss(first=0, last=0, loss=loss, tokens=10),
            PositionLoss(first=1, last=3, loss=loss / 2, tokens=1_030),
        ]
    return result


def test_losses_by_position_are_means_over_seeds() -> None:
    result = with_losses(("softmax", 1, 2.0), ("softmax", 2, 3.0), ("lightconv", 1, 4.0))
    table = result.table("positions")
    assert table.headers == ["position in the block", "softmax", "lightconv", "tokens"]
    assert table.rows == [["0", "2.500", "4.000", "10"], ["1 to 3", "1.250", "2.000", "1,030"]]
    content = next(section for section in sections.SECTIONS if section.name == "positions").content(result)
    assert content is not None
    assert content.plot is not None
    view = content.plot.views[""]
    assert view.x.log
    assert [(point.x, point.y, point.dots) for point in view.series[0].points] == [
        (1, 2.5, [2, 3]),
        (4, 1.25, [1, 1.5]),
    ]
    assert "Who uses far context" in page(result)


def test_tasks_without_losses_by_position_have_no_such_section() -> None:
    assert "Who uses far context" not in page(synthetic())
    with pytest.raises(ValueError, match="the section positions of this result has no table"):
        synthetic().table("positions")
