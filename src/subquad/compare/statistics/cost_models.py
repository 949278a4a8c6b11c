"""Costs as functions of the length, y(L) = a + b L + c L^2 with a, b, c >= 0, and what they predict.

The coefficients are those of least squares in relative errors: sum_i ((a + b L_i + c L_i^2) / y_i - 1)^2. What is left,
r_i = log(y_i / y(L_i)), is the noise of measuring and whatever the model does not know, such as caches. It decides how
sure a prediction is: residuals of the same kind are drawn again, for all mechanisms together (a length at which the
machine was slow was slow for all of them), the coefficients are fitted to what comes out, and a prediction gets a
residual of its own, since a measurement there would have one. The size of the residuals is itself uncertain with
n lengths - 3 coefficients degrees of freedom, so that draws are multiplied as Student's t is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from subquad.compare.statistics.critical import CONFIDENCE

Array = NDArray[np.float64]
DRAWS = 2000
LEAST_LENGTHS = 4
"""Three coefficients go through three points, and leave nothing to tell how sure they are."""
HORIZON = 2.0**22
"""A length in tokens beyond which nobody asks."""
WIDEST = 10.0
"""Residuals of few lengths have no bounds; a cost 20,000 times as high as the model's is as good as infinite."""
SUPPORTS = [support for size in (1, 2, 3) for support in combinations(range(3), size)]


class Interval(NamedTuple):
    """A prediction, and where a measurement would be found with a probability of 95 %. A length may be infinite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class CostModels:
    """The fitted costs of several mechanisms, measured at the same lengths.

    coefficients: (3,) of each; draws: (draws, 3) of each, for data that might as well have been measured; residuals:
    (draws,) of each, logarithms. What has the same row belongs together.
    """

    coefficients: Mapping[str, Array]
    draws: Mapping[str, Array]
    residuals: Mapping[str, Array]

    def at(self, name: str, length: float) -> Interval:
        """The cost at a length."""
        powers = _powers(np.array([length]))[0]
        drawn = self.draws[name] @ powers * np.exp(self.residuals[name])
        return _interval(float(self.coefficients[name] @ powers), drawn)

    def ratio_at(self, name: str, base: str, length: float) -> Interval:
        """How many times as much the base costs at a length: above 1, this one is cheaper."""
        powers = _powers(np.array([length]))[0]
        drawn = self.draws[base] @ powers / (self.draws[name] @ powers)
        drawn = drawn * np.exp(self.residuals[base] - self.residuals[name])
        return _interval(float(self.coefficients[base] @ powers / (self.coefficients[name] @ powers)), drawn)

    def crossover(self, name: str, base: str) -> Interval:
        """The length from which on this one costs no more than the base; 0: everywhere, infinite: nowhere."""
        factors = np.exp(self.residuals[base] - self.residuals[name])[:, None]
        drawn = crossovers(factors * self.draws[base] - self.draws[name])
        value = crossovers((self.coefficients[base] - self.coefficients[name])[None])[0]
        return _interval(float(value), drawn)


def fit_costs(
    lengths: Sequence[int], costs: Mapping[str, Sequence[float]], noise: Mapping[str, float], seed: int = 0
) -> CostModels:
    """Fits the costs at each length, by mechanism.

    noise: the standard deviation that the logarithm of a cost has by measuring alone, by mechanism: residuals that are
    smaller by chance are taken to be as large.
    """
    count = len(lengths)
    if count < LEAST_LENGTHS or len(set(lengths)) < count:
        raise ValueError(f"a cost model needs {LEAST_LENGTHS} different lengths or more (got {count})")
    generator, freedom, names = np.random.default_rng(seed), count - 3, list(costs)
    powers = _powers(np.array(lengths, dtype=np.float64))
    observed = np.array([costs[name] for name in names], dtype=np.float64)  # (mechanisms, lengths)
    coefficients = [non_negative(powers, y, y[None])[0] for y in observed]
    fitted = np.array([powers @ found for found in coefficients])
    left = np.log(observed / fitted)
    sizes = np.sqrt((left**2).sum(axis=1) / freedom)
    least = np.array([noise[name] for name in names])
    # Each drawn residual is a random mixture of those of all lengths: it has their covariance between mechanisms.
    weights = generator.standard_normal((DRAWS, count + 1, count)) / np.sqrt(freedom)
    weights *= np.sqrt(freedom / generator.chisquare(freedom, DRAWS))[:, None, None]
    drawn = np.einsum("dli,mi->mdl", weights, left)
    lacking = np.sqrt(np.maximum(least**2 - sizes**2, 0))
    drawn += lacking[:, None, None] * generator.standard_normal(drawn.shape)
    drawn = drawn.clip(-WIDEST, WIDEST)
    draws = [
        non_negative(powers, y, curve * np.exp(residual[:, :-1]))
        for y, curve, residual in zip(observed, fitted, drawn, strict=True)
    ]
    return CostModels(
        dict(zip(names, coefficients, strict=True)),
        dict(zip(names, draws, strict=True)),
        {name: residual[:, -1] for name, residual in zip(names, drawn, strict=True)},
    )


def non_negative(powers: Array, scale: Array, costs: Array) -> Array:
    """The coefficients (rows, 3) >= 0 of least squares for costs (rows, lengths), in errors relative to `scale`.

    Of the seven choices of coefficients that are not 0, the best whose solution has no negative one is the optimum.
    """
    design, wanted = powers / scale[:, None], costs / scale
    best = np.full(len(costs), np.inf)
    found = np.zeros((len(costs), 3))
    for support in SUPPORTS:
        columns = design[:, support]
        solution = wanted @ np.linalg.pinv(columns).T
        error = ((solution @ columns.T - wanted) ** 2).sum(axis=1)
        better = (solution >= 0).all(axis=1) & (error < best)
        best[better] = error[better]
        found[better] = 0
        found[np.ix_(better, support)] = solution[better]
    return found


def crossovers(differences: Array) -> Array:
    """The smallest L >= 0 with A + B l + C l^2 >= 0 for all l >= L, for rows (A, B, C); infinite if there is none."""
    a, b, c = differences.T
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(np.maximum(b**2 - 4 * a * c, 0))
        largest = np.where(c > 0, (-b + root) / (2 * c), -a / b)
    always = (c >= 0) & (b >= 0) & (a >= 0)
    touches = (c > 0) & (b**2 < 4 * a * c)
    never = (c < 0) | ((c == 0) & ((b < 0) | ((b == 0) & (a < 0))))
    found = np.where(always | touches, 0.0, np.maximum(largest, 0.0))
    return np.where(never | (found > HORIZON), np.inf, found)


def _powers(lengths: Array) -> Array:
    """1, L and L^2 (lengths, 3). float64 keeps them apart up to a million tokens."""
    return np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1).astype(np.float64)


def _interval(value: float, drawn: Array) -> Interval:
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [outside, 1 - outside], method="higher" if np.isinf(drawn).any() else "linear")
    return Interval(value, float(low), float(high))
