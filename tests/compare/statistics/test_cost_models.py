"""Cost models by length: planted coefficients are found, and stated intervals hold what is measured afterwards."""

import math

import numpy as np
import pytest

from subquad.compare.statistics.cost_models import crossovers, fit_costs, non_negative

LENGTHS = [128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
PLANTED = {  # seconds: of a pass, of a token, of a pair of tokens; the last two meet softmax at 400 and nowhere
    "softmax": (1e-3, 2e-5, 1e-7),
    "conv": (1e-3, 6e-5, 0.0),
    "worse": (2e-3, 3e-5, 1.2e-7),
}
NAMES = list(PLANTED)


def true_cost(name: str, length: float) -> float:
    a, b, c = PLANTED[name]
    return a + b * length + c * length**2


def measured(generator: np.random.Generator, noise: float) -> dict[str, list[float]]:
    """A machine that is slow at some lengths for all, and noise of each."""
    together = np.exp(noise * generator.standard_normal(len(LENGTHS)))
    return {
        name: [
            true_cost(name, length) * slow * math.exp(noise * generator.standard_normal())
            for length, slow in zip(LENGTHS, together, strict=True)
        ]
        for name in PLANTED
    }


def test_exact_costs_give_exact_coefficients() -> None:
    models = fit_costs(LENGTHS, measured(np.random.default_rng(0), 0.0), dict.fromkeys(NAMES, 0.0))
    for name, planted in PLANTED.items():
        assert models.coefficients[name] == pytest.approx(planted, rel=1e-6, abs=1e-12)
        found = models.at(name, 8000)
        assert (found.low, found.value, found.high) == pytest.approx([true_cost(name, 8000)] * 3, rel=1e-5)
    assert models.crossover("conv", "softmax") == pytest.approx((400, 400, 400), rel=1e-4)
    assert models.crossover("worse", "softmax") == (math.inf,) * 3
    assert models.crossover("softmax", "worse") == (0, 0, 0)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_intervals_hold_what_is_true_as_often_as_they_say(noise: float) -> None:
    generator, trials = np.random.default_rng(1), 120
    held = dict.fromkeys(["crossover", "cost", "ratio"], 0)
    for trial in range(trials):
        models = fit_costs(LENGTHS, measured(generator, noise), dict.fromkeys(NAMES, 0.0), seed=trial)
        assert all((found >= 0).all() for found in models.draws.values())
        low, high = models.crossover("conv", "softmax")[1:]
        held["crossover"] += low <= 400 <= high
        low, high = models.at("softmax", 8000)[1:]
        held["cost"] += low <= true_cost("softmax", 8000) <= high
        low, high = models.ratio_at("conv", "softmax", 8000)[1:]
        held["ratio"] += low <= true_cost("softmax", 8000) / true_cost("conv", 8000) <= high
    for what, count in held.items():
        assert count >= 0.9 * trials, f"{what}: {count} of {trials}"


def test_less_noise_gives_narrower_intervals_and_known_noise_is_not_undercut() -> None:
    widths = []
    for noise, least in ((0.01, 0.0), (0.1, 0.0), (0.0, 0.1)):
        costs = measured(np.random.default_rng(2), noise)
        found = fit_costs(LENGTHS, costs, dict.fromkeys(NAMES, least)).crossover("conv", "softmax")
        widths.append(found.high / max(found.low, 1))
    assert 1 < widths[0] < widths[1]
    assert widths[2] > 1.1, "residuals of nothing would promise too much"


def test_the_fit_is_the_best_without_negative_coefficients() -> None:
    generator = np.random.default_rng(3)
    powers = np.stack([np.ones(6), np.arange(1.0, 7), np.arange(1.0, 7) ** 2], axis=1)
    costs = generator.uniform(1, 2, (20, 6))
    found = non_negative(powers, np.ones(6), costs)
    best = ((found @ powers.T - costs) ** 2).sum(axis=1)
    for _ in range(300):
        other = np.maximum(found + generator.normal(0, 0.05, found.shape) * generator.integers(0, 2, found.shape), 0)
        assert (((other @ powers.T - costs) ** 2).sum(axis=1) >= best - 1e-12).all()


@pytest.mark.parametrize(
    ("difference", "length"),
    [
        ((-10, 0, 0.1), 10),
        ((-10, 2, 0), 5),
        ((1, 1, 1), 0),
        ((1, -1, 1), 0),
        ((2, -3, 1), 2),
        ((-1, 0, 0), math.inf),
        ((5, 1, -1), math.inf),
        ((5, -1, 0), math.inf),
    ],
)
def test_from_where_on_a_difference_is_not_negative(difference: tuple[float, float, float], length: float) -> None:
    assert crossovers(np.array([difference], dtype=float))[0] == pytest.approx(length)


def test_three_lengths_say_nothing_about_themselves() -> None:
    with pytest.raises(ValueError, match=r"a cost model needs 4 different lengths or more .got 3."):
        fit_costs([1, 2, 3], {"a": [1.0, 2, 3]}, {"a": 0.0})
