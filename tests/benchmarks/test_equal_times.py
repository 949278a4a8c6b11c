"""The benchmark of equal times, in small: what it counts, not how long anything takes."""

from benchmarks.equal_times import compare_copies, describe
from subquad.compare.statistics.times import LOOKS, SpeedRatio


def test_copies_are_timed_as_a_comparison_times_mechanisms() -> None:
    ratios = compare_copies(2, 256, "softmax", "inference")
    assert len(ratios) == 2
    assert {ratio.rounds for ratio in ratios} <= set(LOOKS)


def test_claims_are_counted() -> None:
    equal, faster = SpeedRatio(1.0, 0.99, 1.01, 9), SpeedRatio(1.2, 1.1, 1.3, 9)
    assert describe([[equal, equal], [equal, faster]]).startswith(
        "1 of 2 comparisons with a false claim, 1 of 4 copies; largest ratio 1.200"
    )
