"""The reference study: its rows can be computed, and its page shows what the results that are kept say."""

import pytest

from benchmarks.reference import BEGIN, COMMANDS, END, RESULTS, main, page_parts, stored_results
from benchmarks.reference_rows import ROWS, Row
from subquad.compare.dry_run import plan_mechanisms
from subquad.train.recipe import read_recipe
from tests.compare.report.results import bare, by_seeds, timed
from tools.markdown import fill_between


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_can_be_computed(row: Row) -> None:
    mixers = [label for value in row.mixers for label in ([value] if "*" in value else value.split(","))]
    planned = plan_mechanisms(read_recipe(row.recipe, row.changes), mixers, seeds=row.seeds, match="none")
    assert planned[0].variant.label == "softmax"
    assert {len(one.seeds) for one in planned} == {row.seeds}


def test_the_page_is_that_of_the_results() -> None:
    text = page = (RESULTS.parent / "results.md").read_text()
    for name, content in page_parts(stored_results()).items():
        begin = BEGIN.format(name=name, command=COMMANDS["page"])
        text = fill_between(text, begin, END.format(name=name), content, "docs/results.md")
    assert text == page, f"run {COMMANDS['page']} --write-docs docs/results.md"


def test_a_result_is_shown() -> None:
    result = bare()
    for label, score, milliseconds in (("softmax", 30.0, 100.0), ("eva", 30.1, 50.0)):
        by_seeds(result, label, score)
        timed(result, label, {2048: milliseconds})
    row = Row("longer", "translation, long", "phrases", ("softmax,eva",), published="a paper has 31.")
    parts = page_parts({row: result})
    assert "| translation, long | eva |" in parts["map"]
    assert "30.10 (within" in parts["quality"]
    assert "| eva | 2.0× |" in parts["speed"]
    assert parts["rows"].startswith("### Translation, long\n\nUse eva here")
    assert "subquad compare phrases --mixers softmax,eva --tune 5 --seeds 3" in parts["rows"]
    assert "In papers: a paper has 31." in parts["rows"]


def test_a_row_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit, match="there is no row recall: choose one of recall-128"):
        main(["run", "recall"])
