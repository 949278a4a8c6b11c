"""Normaliser and largest entries of rows in plain torch: the definition."""

from torch import Tensor


def log_sum_exp(values: Tensor) -> Tensor:
    """(rows, V) -> (rows,)."""
    return values.logsumexp(-1)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows, V) -> values and int64 places, (rows, count) each, in falling order."""
    return values.topk(count, -1)
