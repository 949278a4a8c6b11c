"""Normaliser and largest entries of rows in plain torch: the definition."""

from torch import Tensor


def log_sum_exp(values: Tensor) -> Tensor:
    """(rows, V) -> (rows,)."""
    return values.logsumexp(-1)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows, V) -> values and int64 places, (rows, count) each, in falling order."""
    return values.topk(count, -1)


def normalised_largest(values: Tensor, count: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, V) -> (rows,), and values and int64 places, (rows, count) each, in falling order, without one column."""
    normaliser = log_sum_exp(values)
    values[:, hidden] = -float("inf")
    return normaliser, *largest(values, count)
