"""Critical values for several differences at once.

    Dunnett     k mechanisms against one baseline: P(max_i |Y_i - Y_0| / (S sqrt(2)) <= c)
    Tukey       all pairs of k mechanisms:         P(max_ij |Y_i - Y_j| / (S sqrt(2)) <= c)

Y_0, ..., Y_k are independent standard normal, and S^2 is an independent chi-square over its degrees of freedom. Given
Y_0 and S, the others are independent, so that both are integrals over two variables. With k = 1 Dunnett's is Student's
t.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

CONFIDENCE = 0.95
NODES = 160
WIDEST_NORMAL = 8.5
"""Beyond this a normal variable has a probability below 1e-16."""
NEARLY_NORMAL = 1e4
"""From so many degrees of freedom on, S counts as 1."""


def dunnett_probability(c: float, count: int, freedom: float) -> float:
    """P that none of `count` differences from a baseline exceeds c of its standard errors."""
    scale, density = _scale(freedom)
    y, weight = _normal()
    width = math.sqrt(2) * c * scale[:, None]
    inside = (_cdf(y[None] + width) - _cdf(y[None] - width)) ** count
    return float(density @ (inside @ weight))


def tukey_probability(c: float, count: int, freedom: float) -> float:
    """P that no difference between two of `count` mechanisms exceeds c of its standard errors."""
    scale, density = _scale(freedom)
    y, weight = _normal()
    width = math.sqrt(2) * c * scale[:, None]
    inside = count * (_cdf(y[None]) - _cdf(y[None] - width)) ** (count - 1)
    return float(density @ (inside @ weight))


@dataclass(frozen=True)
class Family:
    """Differences that are looked at together.

    probability: that none of them exceeds c of its standard errors. differences: how many there are, by what `count`
    counts.
    """

    probability: Callable[[float, int, float], float]
    differences: Callable[[int], int]

    @cache  # noqa: B019 (there are two families, and they live as long as the program)
    def critical(self, count: int, freedom: float, confidence: float = CONFIDENCE) -> float:
        """The c of this probability."""
        low, high = 0.0, 1.0
        while self.probability(high, count, freedom) < confidence:
            low, high = high, 2 * high
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.probability(middle, count, freedom) < confidence else (low, middle)
        return (low + high) / 2

    def separate(self, count: int, freedom: float, confidence: float = CONFIDENCE) -> float:
        """The same if each difference has an estimate of its own of its standard error: Šidák's, of Student's t."""
        return t_critical(freedom, confidence ** (1 / max(1, self.differences(count))))


DUNNETT = Family(dunnett_probability, lambda count: count)
TUKEY = Family(tukey_probability, lambda count: count * (count - 1) // 2)


def t_critical(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The c with P(|T| <= c) = confidence of Student's distribution."""
    return DUNNETT.critical(1, freedom, confidence)


def _cdf(x: np.ndarray) -> np.ndarray:
    """The normal distribution function."""
    return torch.special.ndtr(torch.from_numpy(x)).numpy()


@cache
def _normal() -> tuple[np.ndarray, np.ndarray]:
    """Nodes of a standard normal variable, and their weights."""
    x, weight = np.polynomial.legendre.leggauss(NODES)
    y = WIDEST_NORMAL * x
    return y, WIDEST_NORMAL * weight * np.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)


@cache
def _scale(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes of S, and their weights. log S has a density that is smooth for any degrees of freedom."""
    if freedom >= NEARLY_NORMAL:
        return np.ones(1), np.ones(1)
    x, weight = np.polynomial.legendre.leggauss(NODES)
    low, high = -40 / freedom - 6 / math.sqrt(freedom), 6 / math.sqrt(freedom)
    log_scale = (high - low) / 2 * x + (high + low) / 2
    half = freedom / 2
    constant = half * math.log(half) - math.lgamma(half) + math.log(2)
    log_density = constant + freedom * log_scale - half * np.exp(2 * log_scale)
    return np.exp(log_scale), (high - low) / 2 * weight * np.exp(log_density)
