"""How many times as fast one thing is as another, from rounds in which each was timed once.

The times of a round are taken one right after the other, in random order, so that a machine that is slow for a while is
slow for all of them. The ratio is that of geometric means: r = exp(mean_t log(base_t / ours_t)), with the interval of
Student's t for the logarithms. Times are looked at after 9, 18 and 36 rounds, and measuring ends at the first look that
decides everything. The error of 5 % is divided by the number of looks and by the number of mechanisms, so that the
chance of one false claim among all of them stays below it, whenever measuring ends.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from subquad.compare.statistics.critical import CONFIDENCE, t_critical

LOOKS = (9, 18, 36)
"""After how many rounds times are looked at."""
TOLERANCE = 1.02
"""Ratios nearer to 1 than this count as equal: two copies of one model may differ by it, through where they lie in
memory.
"""


@dataclass(frozen=True)
class SpeedRatio:
    """How many times as fast as the baseline (below 1: slower), with its interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def is_faster(self) -> bool:
        return self.low > TOLERANCE

    @property
    def is_slower(self) -> bool:
        return self.high < 1 / TOLERANCE

    @property
    def is_equal(self) -> bool:
        return self.low >= 1 / TOLERANCE and self.high <= TOLERANCE

    @property
    def is_decided(self) -> bool:
        return self.is_faster or self.is_slower or self.is_equal


def speed_ratio(ours: Sequence[float], base: Sequence[float], comparisons: int) -> SpeedRatio:
    """From the times of the same rounds. comparisons: how many mechanisms are compared with the baseline."""
    logs = [math.log(theirs / own) for own, theirs in zip(ours, base, strict=True)]
    mean, half = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        confidence = 1 - (1 - CONFIDENCE) / (len(LOOKS) * max(1, comparisons))
        half = t_critical(len(logs) - 1, confidence) * statistics.stdev(logs) / math.sqrt(len(logs))
    return SpeedRatio(math.exp(mean), math.exp(mean - half), math.exp(min(700, mean + half)), len(logs))


def all_decided(times: Mapping[str, Sequence[float]], baseline: str) -> bool:
    """Whether every ratio to the baseline is decided, so that more rounds would tell nothing new."""
    others = [name for name in times if name != baseline]
    ratios = [speed_ratio(times[name], times[baseline], len(others)) for name in others]
    return all(ratio.is_decided for ratio in ratios)
