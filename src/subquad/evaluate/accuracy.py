"""Whether the right class is among the best."""

import numpy as np
from torch import Tensor

from subquad.evaluate.measure import Measure


def class_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """The place of each label among the classes, 0 = best: logits (batch, classes), labels (batch,) -> (batch,).

    Classes that are not surely worse count as better: neither equal logits nor NaN make a hit.
    """
    own = logits.gather(1, labels[:, None])
    return (~(logits < own)).sum(1) - 1


def accuracy(hits: np.ndarray, signature: str) -> Measure:
    """How many of the samples are hits: (samples,) of 0 and 1, as a number from 0 to 1."""
    statistics = np.stack([hits.astype(np.float64), np.ones(len(hits))], 1)
    return Measure(statistics, accuracy_score, signature, percent=True)


def accuracy_score(sums: np.ndarray) -> float:
    """The score of `accuracy` from sums of its statistics."""
    return float(sums[0] / sums[1])


def reported_top_k(num_classes: int) -> tuple[int, ...]:
    """Among how many of the best the right class is looked for; among five of five it always is."""
    return (1, 5) if num_classes > 5 else (1,)
