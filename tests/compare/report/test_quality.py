"""What a result says about quality, and the table of its mechanisms."""

import pytest

from subquad.compare.records import SampleCovariance, Trial
from subquad.compare.report.fairness import parameter_mismatch, same_data_order
from subquad.compare.report.quality import differences, margin, pairs, quality, verdicts
from subquad.tasks.base import Floor
from tests.compare.cases import covariance, synthetic
from tests.compare.report.results import bare, by_seeds, trained


def test_means_and_verdicts() -> None:
    result = bare("softmax eva lara performer")
    for label, value in (("softmax", 30.0), ("eva", 30.1), ("lara", 27.0), ("performer", 32.0)):
        by_seeds(result, label, value)
    result.covariance = covariance(result, 0.05)
    assert verdicts(result) == {"eva": "within", "lara": "worse", "performer": "better"}
    found = quality(result, "lara")
    assert found is not None
    assert (found.mean, found.seeds) == (pytest.approx(27), 3)
    assert quality(bare(), "eva") is None


def test_a_floor_is_no_competitor() -> None:
    result = bare("softmax eva nothing")
    result.mechanisms[2].floor = True
    for label in result.labels:
        by_seeds(result, label, 30.0)
    assert list(differences(result)) == ["eva"]
    assert list(pairs(result)) == [("softmax", "eva")]
    assert quality(result, "nothing") is not None


def test_what_was_evaluated_on_other_samples_is_not_compared() -> None:
    result = bare("softmax eva lara")
    for label in result.labels:
        trained(result, label, [30.0])
    result.covariance = SampleCovariance(
        trials=[("softmax", 1), ("eva", 1)], values=[[0.1, 0.05], [0.05, 0.1]], samples=500
    )
    assert set(differences(result)) == {"eva"}


def test_a_margin_may_be_a_share() -> None:
    result = bare(margin=0.02)
    result.metric.relative_margin = True
    by_seeds(result, "softmax", 50.0)
    assert margin(result) == pytest.approx(1.0)
    assert margin(bare()) == 0.5


def test_parameters_and_data_order() -> None:
    result = synthetic()
    assert list(parameter_mismatch(result)) == ["primal"]
    assert same_data_order(result) is True
    done = result.trials_of("eva")[0]
    done.data_order = "another"
    assert same_data_order(result) is False
    done.data_order = None
    assert same_data_order(result) is None


def test_the_table_leaves_out_columns_without_numbers() -> None:
    result = bare()
    trained(result, "softmax", [30.0])
    result.trials.append(Trial(mechanism="eva", seed=1, status="failed", reason="out of memory"))
    shown = result.table()
    assert shown.headers == ["mechanism", "BLEU (95% interval)", "runs"]
    assert shown.rows == [["softmax", "30.00", "1 done"], ["eva", "–", "1 failed"]]
    assert shown.states == ["done", "failed"]


def test_the_table_of_everything() -> None:
    result = synthetic()
    result.floors = [Floor(name="copy", kind="trivial", value=3.25, how="The source is its own translation.")]
    shown = result.table()
    rows = {row[0]: dict(zip(shown.headers, row, strict=True)) for row in shown.rows}
    assert rows["softmax"]["against softmax"] == "–"
    assert rows["softmax"]["faster from"] == "–"
    assert rows["lightconv"]["faster from"] == "always"
    assert rows["lightconv"]["training speed at 2,048 tokens"].startswith("5.7× (")
    assert rows["primal"]["against softmax"].startswith("worse by 2.")
    assert rows["performer"]["runs"] == "2 done, 1 failed"
    assert rows["primal"]["parameters"] == "9.72 M"
    assert rows["copy"]["BLEU (95% interval)"] == "3.25"
    assert shown.states[-1] == "floor"
