"""What decoding asks of scores over a vocabulary: their normaliser, and the largest. Neither has a gradient.

log_sum_exp(values)[r]        log sum_i exp(values[r, i])
largest(values, count)[r]     the `count` largest entries of a row, the largest first, and where they stand
"""

import torch
from torch import Tensor

from subquad.kernels import dispatch, tracing


def log_sum_exp(values: Tensor) -> Tensor:
    """(rows, V) -> (rows,)."""
    if _compiled_for(values):
        from subquad.kernels.vocabulary import cpu

        return cpu.log_sum_exp(values)
    return values.logsumexp(-1)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows, V) -> values and int64 places, (rows, count) each; count <= V. Of equal entries any may come first."""
    if _compiled_for(values):
        from subquad.kernels.vocabulary import cpu

        return cpu.largest(values, count)
    return values.topk(count, -1)


def _compiled_for(values: Tensor) -> bool:
    if tracing.is_tracing() or values.dtype not in (torch.float32, torch.float64):
        return False
    return dispatch.chosen(values) == "cpu"
