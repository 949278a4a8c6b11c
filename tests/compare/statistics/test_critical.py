"""Critical values: against scipy's, and against the definition where scipy has none."""

import numpy as np
import pytest

from subquad.compare.statistics.critical import DUNNETT, TUKEY, dunnett_probability, t_critical


@pytest.mark.parametrize("freedom", [1, 1.37, 2, 4, 9, 30, 2000])
def test_students_t(freedom: float) -> None:
    t = pytest.importorskip("scipy.stats").t
    for confidence in (0.95, 0.99, 0.999):
        assert t_critical(freedom, confidence) == pytest.approx(t.ppf((1 + confidence) / 2, freedom), rel=1e-3)


@pytest.mark.parametrize(("count", "freedom"), [(2, 2), (3, 4), (5, 12), (11, 30)])
def test_tukey(count: int, freedom: float) -> None:
    ranges = pytest.importorskip("scipy.stats").studentized_range
    assert TUKEY.critical(count, freedom) * np.sqrt(2) == pytest.approx(ranges.ppf(0.95, count, freedom), rel=1e-4)


@pytest.mark.parametrize(("count", "freedom"), [(1, 3), (2, 10), (5, 20), (10, 8)])
def test_dunnett(count: int, freedom: int) -> None:
    """The probability that scipy's test gives, for groups with the same number of values."""
    stats = pytest.importorskip("scipy.stats")
    c = DUNNETT.critical(count, freedom)
    shared = 0.5 + 0.5 * np.eye(count)
    inside = stats.multivariate_t(shape=shared, df=freedom, seed=0)
    found = inside.cdf(np.full(count, c), lower_limit=np.full(count, -c), maxpts=200_000)
    assert found == pytest.approx(0.95, abs=2e-3)


def test_tables_of_dunnett() -> None:
    """Values of the published tables of the two-sided test at 5 %."""
    for count, freedom, value in ((2, 5, 3.03), (2, 10, 2.57), (9, 1e9, 2.69)):
        assert DUNNETT.critical(count, freedom) == pytest.approx(value, abs=0.006)


def test_probabilities_are_probabilities() -> None:
    for freedom in (1, 3, 1e6):
        assert dunnett_probability(0, 3, freedom) == pytest.approx(0, abs=1e-9)
        assert dunnett_probability(1e4, 3, freedom) == pytest.approx(1, abs=1e-3)
