"""Steps of many streams whose past lies in each other's rows; for inference.

Hypotheses of a beam search change places at every step. What a hypothesis has read stays where it was written, and only
an order moves: o(r, j) = order[r, j] is the row of a buffer that holds entry j of row r. Where all entries of a row lie
in one row of the buffer, such as the context that several hypotheses read, the order has one column.

    gathered_attention    y[r, h] = sum_j p_j v[o(r, j), h, j],   p = softmax_j(q[r, h] . k[o(r, j), h, j] / sqrt(d)),
                          j < lengths[r]
    gathered_conv         y[r, c] = sum_k taps[(r,) head(c), k] x[o(r, k), first + k, c]

numba runs them on the CPU (cpu.py). A GPU moves the rows themselves.
"""

import torch
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.dispatch import choose, has_kernel


def may_gather(x: Tensor, buffer: Tensor) -> bool:
    """Whether a step may call these functions: on a CPU, in the precision of the buffer, and without a gradient."""
    if torch.is_grad_enabled() or tracing.is_tracing() or x.device.type != "cpu" or x.dtype != buffer.dtype:
        return False
    return has_kernel("gathered", x)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
    """The equation above.

    q: (rows, heads, d); k, v: (any, heads, places, d), contiguous; order: (rows, at least max lengths) or (rows, 1)
    int64; lengths: (rows,) int64, at least 1 -> (rows, heads, d).
    """
    assert k.shape == v.shape, f"keys {tuple(k.shape)} and values {tuple(v.shape)}"
    return choose("gathered", q).gathered_attention(q, k, v, order, lengths)


def gathered_conv(x: Tensor, taps: Tensor, order: Tensor, first: int) -> Tensor:
    """The equation above.

    x: (any, places, C), contiguous, of which entries first .. first + K - 1 are read; taps: (H, K) or (rows, H, K);
    order: (rows, K) or (rows, 1) int64 -> (rows, C).
    """
    assert first + taps.shape[-1] <= x.shape[1], f"{taps.shape[-1]} taps from {first} on, of {x.shape[1]} places"
    return choose("gathered", x).gathered_conv(x, taps, order, first)
