"""What to take at one length: the cheapest mechanism of sound quality, or nothing."""

from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.report.decision import decide
from subquad.compare.report.quality import verdicts
from tests.compare.cases import synthetic


def test_the_fastest_of_those_that_are_as_good_is_taken() -> None:
    result = synthetic()
    said = verdicts(result)
    assert said["lightconv"] == "within"
    assert decide(result, "time") == "lightconv"
    assert decide(result, "memory") == "lightconv"


def test_faster_and_worse_is_never_taken_and_the_baseline_stays() -> None:
    result = synthetic(labels=("softmax", "primal"))
    assert verdicts(result)["primal"] == "worse"
    assert decide(result, "time") == "softmax"


def test_what_is_undecided_stays_open() -> None:
    """The same differences, with test samples that say little."""
    result = synthetic(labels=("softmax", "eva"))
    assert result.covariance is not None
    result.covariance.values = [[400 * value for value in row] for row in result.covariance.values]
    assert set(verdicts(result).values()) == {"undecided"}
    assert decide(result, "time") is None


def test_one_seed_and_missing_costs_decide_nothing() -> None:
    assert decide(synthetic(seeds=1), "time") is None
    result = synthetic()
    result.measurements = {
        name: [point for point in points if not isinstance(point, LengthPoint)]
        for name, points in result.measurements.items()
    }
    assert decide(result, "time") is None


def test_a_control_that_failed_decides_nothing() -> None:
    result = synthetic()
    base = result.lengths_of("softmax", "full")[2048]
    assert base.training is not None
    slow = base.training.model_copy(update={"rounds": [2 * value for value in base.training.rounds]})
    result.add_points([base.model_copy(update={"control": True, "training": slow})])
    assert decide(result, "time") is None
