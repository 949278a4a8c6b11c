"""The accuracy of classification: whether the right class is among the k best."""

import numpy as np
from torch import Tensor

from subquad.evaluate.measure import Measure


def class_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the rank (batch,) of each label (batch,) by its logit (batch, num_classes), where 0 is the best.

    Equal logits and NaN count as better than the label's, so that they are never a hit.
    """
    own = logits.gather(1, labels[:, None])
    return (~(logits < own)).sum(1) - 1


def accuracy(hits: np.ndarray, signature: str) -> Measure:
    """Returns the share of samples that are hits. hits: (samples,), 0 or 1."""
    statistics = np.stack([hits.astype(np.float64), np.ones(len(hits))], 1)
    return Measure(statistics, accuracy_score, signature, percent=True)


def accuracy_score(sums: np.ndarray) -> float:
    """Computes the score of `accuracy` from sums of its statistics."""
    return float(sums[0] / sums[1])


def reported_top_k(num_classes: int) -> tuple[int, ...]:
    """Returns the k of the reported top-k accuracies. Top-5 is always right with five classes, and is left out."""
    return (1, 5) if num_classes > 5 else (1,)
