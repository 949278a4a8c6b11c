"""The file of a result keeps everything, and refuses what it cannot mean."""

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from subquad.compare.measure.lengths import Timing
from subquad.compare.records import SampleCovariance, Score, Trial
from subquad.compare.report.result import read_result
from tests.compare.cases import synthetic
from tests.compare.report.results import bare


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = synthetic()
    result.to_json(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result


def test_a_result_is_filled_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = bare()
    result.trials.append(Trial(mechanism="eva", seed=1))
    result.to_json(path)
    again = read_result(path)
    trial = again.trials[0]
    trial.status, trial.parameters = "done", 12
    again.to_json(path)
    assert read_result(path).trials_of("eva")[0].parameters == 12


def test_what_nobody_compares_is_refused(tmp_path: Path) -> None:
    result = bare()
    result.trials.append(Trial(mechanism="lara", seed=1))
    with pytest.raises(ValidationError, match="no mechanism is labelled lara"):
        result.to_json(tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_a_covariance_has_a_row_for_each_trial() -> None:
    found = SampleCovariance(trials=[("eva", 1), ("softmax", 1)], values=[[1.0]], samples=10)
    with pytest.raises(ValidationError, match="a row and a column for each of its trials"):
        bare().covariance = found


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValidationError):
        Score(value=math.nan)
    with pytest.raises(ValidationError, match="reason"):
        Trial(mechanism="eva", seed=1, status="failed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "subquad-comparison-9"}, "does not describe a comparison of format subquad-comparison-1"),
        ({"baseline": "lara"}, "no mechanism is labelled lara"),
        ({"trials": [{"mechanism": "eva", "seed": "x"}]}, r"trials\.0\.seed"),
    ],
)
def test_damaged_files_are_one_clear_line(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(bare().model_dump(mode="json") | change))
    with pytest.raises(ValueError, match=message) as error:
        read_result(path)
    assert "\n" not in str(error.value)


def test_timing_of_rounds() -> None:
    timing = Timing.of([0.005, 0.001, 0.002, 0.004, 0.003])
    assert (timing.low, timing.median, timing.high) == pytest.approx((2, 3, 4))
    assert timing.rounds == pytest.approx([5, 1, 2, 4, 3])
    pair = Timing.of([0.003, 0.001])
    assert (pair.low, pair.median, pair.high) == pytest.approx((1, 2, 3))
