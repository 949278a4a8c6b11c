"""Confidence intervals and paired tests, by the bootstrap over samples.

A resample draws as many samples as there are, with replacement. The confidence interval lies between percentiles of the
scores of the resamples. Two systems are compared on the same resamples. The two-sided p-value is the share of resamples
whose difference is at least as far from the mean difference as the observed one is from 0; the observed one counts as
one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subquad.evaluate.measure import Measure

SEED = 12345
RESAMPLES = 1000
LEVEL = 0.95
STEP = 1e-4  # of the sums, for the gradient of a score
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


def score_covariance(measures: Sequence[Measure]) -> np.ndarray:
    """Returns the covariance (measures, measures) of scores of the same samples, over test sets of this size.

    To the first order a score changes by the sum of what every sample adds: with the gradient g of the score in the
    sums and the mean m of the statistics x_i, sample i adds g · (x_i - m).
    """
    added = np.stack([_influence(measure) for measure in measures])
    samples = added.shape[1]
    return added @ added.T * (samples / max(1, samples - 1))


def _influence(measure: Measure) -> np.ndarray:
    """Returns what every sample adds to the score, (samples,)."""
    statistics = np.asarray(measure.statistics, np.float64)
    sums = statistics.sum(0)
    gradient = np.zeros_like(sums)
    for place, total in enumerate(sums):
        step = np.zeros_like(sums)
        step[place] = STEP * max(1.0, abs(total))
        gradient[place] = (measure.score(sums + step) - measure.score(sums - step)) / (2 * step[place])
    return (statistics - statistics.mean(0)) @ gradient


def _scores(measure: Measure, resamples: int, seed: int) -> np.ndarray:
    return np.array([measure.score(sums) for sums in resample_sums(measure.statistics, resamples, seed)])


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float]:
    tail = 50 * (1 - level)
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
