"""A measure is a metric with additive statistics of every sample, and a score that is a function of their sum.

    score of a split        score(sum_i statistics[i])
    score of a resample     score(sum_i count[i] * statistics[i])

So `evaluate.significance` computes intervals and tests from the statistics alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Measure:
    """One metric of one split.

    statistics: (samples, k). score: maps sums (k,) to the metric. signature: says how it was computed. percent: whether
    it is shown times 100. decimals: how many are shown.
    """

    statistics: np.ndarray
    score: Callable[[np.ndarray], float]
    signature: str
    better: Literal["higher", "lower"] = "higher"
    percent: bool = False
    decimals: int = 2

    def __post_init__(self) -> None:
        if self.statistics.ndim != 2 or not len(self.statistics):
            raise ValueError(f"a measure needs samples, but statistics of shape {self.statistics.shape} have none")

    @property
    def value(self) -> float:
        return self.score(self.statistics.sum(0))
