"""The loss of a language model by the position of a token in its block: whether it makes use of far context.

The token at position p of a block is predicted from the p + 1 tokens before it, with which the block's inputs begin.
Positions are put into buckets that double in size: 0, 1, 2-3, 4-7, 8-15 and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss, in nats, of the `tokens` scored tokens at the positions `first` to `last` of their blocks."""

    first: int
    last: int
    loss: float
    tokens: int


def position_buckets(length: int) -> list[slice]:
    """Returns the buckets of the positions 0 to length - 1. The last one may be smaller than its place allows."""
    ends = [1 << power for power in range((length - 1).bit_length() + 1)]
    return [slice(begin, min(end, length)) for begin, end in zip([0, *ends], ends, strict=False)]


def mean_losses(sums: np.ndarray, buckets: Sequence[slice]) -> list[PositionLoss]:
    """sums: (buckets, 2), the summed loss and the number of tokens of each. Buckets without tokens are left out."""
    return [
        PositionLoss(bucket.start, bucket.stop - 1, float(total / tokens), int(tokens))
        for bucket, (total, tokens) in zip(buckets, sums, strict=True)
        if tokens
    ]
