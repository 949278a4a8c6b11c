"""A measure: numbers of every sample that add up, and the score of a sum.

    score of a split        score(sum_i statistics[i])
    score of a resample     score(sum_i count[i] * statistics[i])

So intervals and tests (`evaluate.significance`) need no second look at the samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Measure:
    """One metric of one split. statistics: (samples, k); score: of sums (k,); signature: how it was computed.

    percent: people read it times 100; decimals: so many of them.
    """

    statistics: np.ndarray
    score: Callable[[np.ndarray], float]
    signature: str
    better: Literal["higher", "lower"] = "higher"
    percent: bool = False
    decimals: int = 2

    def __post_init__(self) -> None:
        if self.statistics.ndim != 2 or not len(self.statistics):
            raise ValueError(f"a measure needs samples: statistics of shape {self.statistics.shape} have none")

    @property
    def value(self) -> float:
        return self.score(self.statistics.sum(0))
