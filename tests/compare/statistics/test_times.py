"""Ratios of times: decided where they are, undecided where they are not, and rarely wrong, whenever measuring ends."""

import math

import numpy as np
import pytest

from subquad.compare.statistics.times import LOOKS, all_decided, speed_ratio


def test_a_ratio_and_its_interval() -> None:
    base = [1.0, 1.1, 0.9, 1.05, 1.0, 0.95, 1.0, 1.02, 0.98]
    ratio = speed_ratio([0.5 * time for time in base], base, comparisons=1)
    assert ratio.ratio == pytest.approx(2)
    assert (ratio.low, ratio.high) == pytest.approx((2, 2))
    assert ratio.is_faster
    assert speed_ratio(base, base, 1).is_equal
    assert speed_ratio(base, [time / 2 for time in base], 1).is_slower


def test_one_round_decides_nothing() -> None:
    ratio = speed_ratio([1.0], [2.0], comparisons=1)
    assert not ratio.is_decided
    assert (ratio.low, ratio.rounds) == (0, 1)


def test_more_comparisons_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    ours, base = rng.lognormal(0, 0.05, (2, 9))
    alone, many = speed_ratio(ours, base, 1), speed_ratio(ours, base, 10)
    assert many.low < alone.low
    assert many.high > alone.high


def false_claims(comparisons: int, draws: int, correlation: float = 0.0) -> tuple[float, float]:
    """The share of comparisons of equal mechanisms with a false claim, and the mean number of rounds.

    Noise has heavy tails (a tenth of the rounds take up to twice as long), and may follow the round before.
    """
    rng, claims, rounds = np.random.default_rng(1), 0, 0
    for _ in range(draws):
        noise = rng.normal(0, 0.03, (comparisons + 1, LOOKS[-1]))
        for t in range(1, LOOKS[-1]):
            noise[:, t] = correlation * noise[:, t - 1] + math.sqrt(1 - correlation**2) * noise[:, t]
        noise += rng.uniform(0, 0.7, noise.shape) * (rng.random(noise.shape) < 0.1)
        times = dict(zip(["base", *map(str, range(comparisons))], np.exp(noise), strict=True))
        for look in LOOKS:
            seen = {name: found[:look] for name, found in times.items()}
            if all_decided(seen, "base"):
                break
        ratios = [speed_ratio(seen[name], seen["base"], comparisons) for name in seen if name != "base"]
        claims += any(ratio.is_faster or ratio.is_slower for ratio in ratios)
        rounds += look
    return claims / draws, rounds / draws


def test_equal_times_are_rarely_called_different() -> None:
    assert false_claims(5, draws=100)[0] <= 0.05


@pytest.mark.nightly
@pytest.mark.parametrize("correlation", [0.0, 0.3])
@pytest.mark.parametrize("comparisons", [1, 5, 10])
def test_calibration_of_times(comparisons: int, correlation: float) -> None:
    assert false_claims(comparisons, 2000, correlation)[0] <= 0.05


def test_clear_ratios_end_the_measuring() -> None:
    rng = np.random.default_rng(2)
    noise = rng.lognormal(0, 0.02, (3, 9))
    times = {"softmax": noise[0], "eva": 0.5 * noise[1], "lara": 1.7 * noise[2]}
    assert all_decided(times, "softmax")
    assert not all_decided({**times, "equal": 1.01 * noise[1]}, "softmax")
