"""What decoding asks of scores over a vocabulary: their normaliser, and the largest. Neither has a gradient.

log_sum_exp(values)[r]        log sum_i exp(values[r, i])
largest(values, count)[r]     the `count` largest entries of a row, the largest first, and where they stand

`normalised_largest` does both, reading each row half as often.
"""

from typing import Any

from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.dispatch import choose
from subquad.kernels.vocabulary import reference


def log_sum_exp(values: Tensor) -> Tensor:
    """(rows, V) -> (rows,)."""
    return _kernel(values).log_sum_exp(values)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows, V) -> values and int64 places, (rows, count) each; count <= V. Of equal entries any may come first."""
    assert 0 < count <= values.shape[1], f"{count} of {values.shape[1]} entries"
    return _kernel(values).largest(values, count)


def normalised_largest(values: Tensor, count: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """`log_sum_exp`, and then `largest` without column `hidden`, which is set to -inf in place.

    (rows, V) -> (rows,), and values and int64 places, (rows, count) each; count < V.
    """
    assert 0 < count < values.shape[1] > hidden >= 0, f"{count} of {values.shape[1]} entries without number {hidden}"
    return _kernel(values).normalised_largest(values, count, hidden)


def _kernel(values: Tensor) -> Any:
    """A compiled graph takes torch's own functions, which need no `torch.library` operation around them."""
    return reference if tracing.is_tracing() else choose("vocabulary", values)
