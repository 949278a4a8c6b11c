"""Differences between mechanisms: known cases by hand, and how often they are right, by simulation."""

import math

import numpy as np
import pytest

from subquad.compare.statistics.scores import (
    Difference,
    Scores,
    against_baseline,
    all_pairs,
    estimates,
    seeds_to_decide,
    verdict,
)
from tests.compare.statistics.simulation import Truth, coverage_of_means, share_of


def table(values: dict[str, list[float]], deviation: float = 0.0, samples: int = 1000) -> Scores:
    """Scores by mechanism, with seeds 1, 2, ...; deviation: of each over test sets, independently."""
    trials = [(label, seed, value) for label, found in values.items() for seed, value in enumerate(found, 1)]
    covariance = np.eye(len(trials)) * deviation**2
    numbers = np.array([value for _, _, value in trials])
    return Scores(numbers, [label for label, _, _ in trials], [seed for _, seed, _ in trials], covariance, samples)


def test_one_mechanism_is_the_paired_t_test() -> None:
    """Seeds differ much, the mechanisms within a seed little: only pairs show it."""
    ours, base = [20.0, 30.1, 40.05], [19.0, 29.0, 39.0]
    found = against_baseline(table({"softmax": base, "eva": ours}), "softmax")["eva"]
    expected = pytest.importorskip("scipy.stats").ttest_rel(ours, base)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-4)
    assert (found.seeds, found.single_seed) == (3, False)


def test_the_variance_is_pooled() -> None:
    """The same pair of mechanisms is decided with the help of others that show how little a seed changes."""
    two = {"softmax": [30.0, 30.4], "eva": [29.0, 29.2]}
    others = {f"m{i}": [30.0 + 0.1 * i, 30.3 + 0.1 * i] for i in range(6)}
    alone = against_baseline(table(two), "softmax")["eva"]
    pooled = against_baseline(table({**two, **others}), "softmax")["eva"]
    assert alone.low < 0 < alone.high
    assert pooled.high < 0
    assert pooled.mean == pytest.approx(alone.mean)


def test_a_seed_without_the_baseline_does_not_count() -> None:
    found = against_baseline(table({"softmax": [30.0, 31.0], "eva": [29.0, 30.1, 50.0]}), "softmax")["eva"]
    assert found.mean == pytest.approx(-0.95)
    assert found.seeds == 2


def test_a_mechanism_with_a_failed_trial_is_still_compared() -> None:
    values = {"softmax": [30.0, 31.0, 32.0], "eva": [29.0, 30.1, 31.0], "lara": [28.0]}
    found = against_baseline(table(values), "softmax")["lara"]
    assert (found.mean, found.seeds, found.single_seed) == (pytest.approx(-2.0, abs=0.05), 1, False)


def test_test_samples_widen_the_interval() -> None:
    values = {"softmax": [30.0, 30.1, 30.2], "eva": [29.9, 30.0, 30.1]}
    sure, unsure = (against_baseline(table(values, deviation), "softmax")["eva"] for deviation in (0.0, 0.5))
    assert sure.low == pytest.approx(sure.high, abs=1e-9)
    assert unsure.high - unsure.low > 2 * 1.9 * 0.5 * math.sqrt(2 / 3)


def test_one_seed_says_nothing_about_mechanisms() -> None:
    found = against_baseline(table({"softmax": [30.0], "eva": [25.0]}, 0.1), "softmax")["eva"]
    assert found.single_seed
    assert verdict(found, 0.5, "higher") == "one seed"
    assert found.high < 0


def test_equal_runs_are_not_different() -> None:
    found = against_baseline(table({"softmax": [30.0, 31.0], "eva": [30.0, 31.0]}), "softmax")["eva"]
    assert (found.mean, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-4)


def test_pairs_are_compared_at_once() -> None:
    values = {"softmax": [30.0, 30.3, 30.1], "eva": [29.0, 29.1, 29.2], "lara": [29.1, 29.0, 29.3]}
    pairs = all_pairs(table(values, 0.05))
    assert set(pairs) == {("softmax", "eva"), ("softmax", "lara"), ("eva", "lara")}
    single = against_baseline(table(values, 0.05), "softmax")["eva"]
    assert pairs["softmax", "eva"].high - pairs["softmax", "eva"].low > single.high - single.low
    apart = Scores(np.array([1.0, 2.0]), ["a", "b"], [1, 2], np.zeros((2, 2)), 10)
    assert all_pairs(apart) == {}, "no common seed"


def test_means_include_the_seeds_own_effect() -> None:
    found = estimates(table({"softmax": [29.0, 31.0], "eva": [28.0, 30.0]}))["eva"]
    assert (found.mean, found.seeds) == (pytest.approx(29), 2)
    assert found.high - found.low > 4


@pytest.mark.parametrize(
    ("low", "high", "better", "said"),
    [
        (-0.2, 0.3, "higher", "within"),
        (-0.3, -0.1, "higher", "within"),
        (-2.0, -0.1, "higher", "worse"),
        (-2.0, -0.1, "lower", "better"),
        (0.1, 0.9, "higher", "better"),
        (-0.1, 0.9, "higher", "undecided"),
    ],
)
def test_verdicts(low: float, high: float, better: str, said: str) -> None:
    found = Difference((low + high) / 2, low, high, 3, False)
    assert verdict(found, 0.5, better) == said  # type: ignore[arg-type]


def test_how_many_more_seeds_would_decide() -> None:
    values = {"softmax": [30.0, 30.6, 30.3], "eva": [29.9, 30.1, 30.2]}
    more = seeds_to_decide(table(values, 0.02), "softmax", "eva", 1.0)
    assert more is not None
    assert 1 <= more <= 5
    hopeless = {"softmax": [30.0, 30.2, 30.1], "eva": [29.9, 30.1, 30.05]}
    common = table(hopeless)
    wide = Scores(common.values, common.mechanisms, common.seeds, np.kron(np.eye(2), np.ones((3, 3))), 100)
    assert seeds_to_decide(wide, "softmax", "eva", 0.5) is None, "only more test samples would help"


# ---------------------------------------------------------------------- how often it is right


def test_false_claims_and_coverage() -> None:
    """A cell of the nightly simulation, with fewer draws: 5 % of 300 are 15, with a standard deviation of 4."""
    found = share_of(Truth(mechanisms=5, seeds=3), draws=300)
    assert found.false_claims <= 0.05 + 3 * 0.0126
    assert found.coverage >= 0.95 - 3 * 0.0126


def test_a_large_difference_is_found() -> None:
    found = share_of(Truth(mechanisms=5, seeds=3, effect=5.0), draws=60)
    assert found.power > 0.9


def test_a_few_seeds_that_agree_by_chance_claim_nothing() -> None:
    """With many samples and two seeds nearly all of the variance is that of two numbers."""
    found = share_of(Truth(mechanisms=1, seeds=2, samples=10_000), draws=300)
    assert found.false_claims <= 0.05 + 3 * 0.0126


def test_intervals_of_single_means_know_that_seeds_are_common_to_all() -> None:
    assert coverage_of_means(Truth(mechanisms=10, seeds=2, samples=10_000), draws=200) >= 0.92


@pytest.mark.nightly
@pytest.mark.parametrize("samples", [250, 10_000])
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("mechanisms", [1, 5, 10])
def test_calibration(mechanisms: int, seeds: int, samples: int) -> None:
    """2,000 draws a cell, once with independent samples and once with documents of ten equal ones.

    A share of 5 % of 2,000 has a standard deviation of 0.5 %. Power is that of an effect of 5 standard errors. A test
    that must estimate a variance from up to ten degrees of freedom has less power than one that knows it, whatever it
    does, and with one or two its intervals are wider than they need be: there only the false claims are bounded.
    """
    for document in (1, 10):
        truth = Truth(mechanisms, seeds, samples, document=document)
        found = share_of(truth, draws=2000)
        assert found.false_claims <= 0.05 + 3 * 0.005
        assert found.coverage >= 0.935
        assert coverage_of_means(truth, draws=500) >= 0.93
        if mechanisms * (seeds - 1) > 10:
            assert found.coverage <= 0.98
            planted = share_of(Truth(mechanisms, seeds, samples, document=document, effect=5.0), draws=1000)
            assert planted.power >= 0.95 * planted.oracle


@pytest.mark.nightly
def test_a_worse_mechanism_is_not_recommended() -> None:
    """2 BLEU worse, with 0.8 between seeds: "within 0.5" or "better" is said in at most 5 %."""
    truth = Truth(5, 3, 1000, of_seeds=0.8, of_samples=12.0, of_both=12.0, shift=-2.0)
    assert share_of(truth, draws=2000, margin=0.5).recommended <= 0.05
