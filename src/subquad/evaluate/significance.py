"""Confidence intervals and paired tests, by the bootstrap over samples.

A resample draws as many samples as there are, with replacement. The confidence interval lies between percentiles of the
scores of the resamples. Two systems are compared on the same resamples. The two-sided p-value is the share of resamples
whose difference is at least as far from the mean difference as the observed one is from 0; the observed one counts as
one of them.
"""

from dataclasses import dataclass

import numpy as np

from subquad.evaluate.measure import Measure

SEED = 12345
RESAMPLES = 1000
LEVEL = 0.95
CHUNK = 1 << 22  # random numbers in memory at a time


@dataclass(frozen=True)
class Interval:
    """The share `level` of the scores of the resamples lies between low and high."""

    low: float
    high: float
    level: float
    resamples: int


@dataclass(frozen=True)
class Comparison:
    """difference: the score of the first system minus that of the second, with its interval. p_value: two-sided."""

    difference: float
    low: float
    high: float
    p_value: float
    level: float
    resamples: int


def resample_sums(statistics: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Returns sums (resamples, k) of statistics (samples, k). Resamples depend only on seed and number of samples."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    samples = len(statistics)
    values = np.asarray(statistics, np.float64)
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = max(1, CHUNK // samples)
    sums = []
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        drawn = generator.integers(samples, size=(count, samples))
        drawn += samples * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * samples).reshape(count, samples)
        sums.append(times.astype(np.float64) @ values)
    return np.concatenate(sums)


def confidence_interval(
    measure: Measure, resamples: int = RESAMPLES, seed: int = SEED, level: float = LEVEL
) -> Interval:
    """Returns the confidence interval of a measure."""
    scores = _scores(measure, resamples, seed)
    low, high = _percentiles(scores, level)
    return Interval(low, high, level, resamples)


def paired_test(
    first: Measure, second: Measure, resamples: int = RESAMPLES, seed: int = SEED, level: float = LEVEL
) -> Comparison:
    """Tests whether two systems differ. Both measures have the same samples in the same order."""
    if len(first.statistics) != len(second.statistics):
        raise ValueError(
            f"a paired test needs the same samples: one system has {len(first.statistics):,}, "
            f"the other {len(second.statistics):,}"
        )
    if first.signature != second.signature:
        raise ValueError(f"the two scores were computed differently: {first.signature} and {second.signature}")
    difference = first.value - second.value
    differences = _scores(first, resamples, seed) - _scores(second, resamples, seed)
    low, high = _percentiles(differences, level)
    further = np.count_nonzero(np.abs(differences - differences.mean()) >= abs(difference))
    return Comparison(difference, low, high, (int(further) + 1) / (resamples + 1), level, resamples)


def _scores(measure: Measure, resamples: int, seed: int) -> np.ndarray:
    return np.array([measure.score(sums) for sums in resample_sums(measure.statistics, resamples, seed)])


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float]:
    tail = 50 * (1 - level)
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
