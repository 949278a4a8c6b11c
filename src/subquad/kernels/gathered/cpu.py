"""Attention and convolution over entries of other rows on the CPU, compiled by numba: see `__init__.py`.

Queries of decoding are single ones, to some tens of keys. torch would copy keys and values to where they are expected,
and call products and a softmax that are made for more; here a thread takes some rows, and every entry is read where it
lies, once.
"""

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from subquad.kernels.llvm.exponential import exponentials
from subquad.kernels.llvm.gathered import gathered_products, gathered_sums
from subquad.kernels.llvm.vectors import EIGHT, ONE, THIRTY_TWO, unsigned
from subquad.kernels.numba_tools import compiled, run, view
from subquad.kernels.numba_tools import why_unavailable as why_unavailable

DTYPES = (torch.float32, torch.float64)
TASK_ROWS = 16
"""Rows of one task of a thread."""
_products_32, _products_8, _products_1 = (gathered_products(width) for width in (32, 8, 1))
_sums_32, _sums_8, _sums_1 = (gathered_sums(width) for width in (32, 8, 1))
_exp_8 = exponentials(8)
ZERO = unsigned(0)


@compiled
def _attend(y, q, k, v, places, order, order_step, lengths, scale):  # type: ignore[no-untyped-def]
    """y[r, h] of q (rows, heads, d) and flat k, v; entry j of row r lies in row order[r, j order_step] of k and v."""
    rows, heads, width = q.shape
    size, row_size, step = unsigned(width), unsigned(heads * places * width), unsigned(order_step)
    for task in prange((rows + TASK_ROWS - 1) // TASK_ROWS):
        weights = np.empty(places + 8, k.dtype)
        for r in range(task * TASK_ROWS, min((task + 1) * TASK_ROWS, rows)):
            count = lengths[r]
            n, row_at = unsigned(count), unsigned(r * order.shape[1])
            for h in range(heads):
                at, begin = unsigned((r * heads + h) * width), unsigned(h * places * width)
                end = at + size
                weights[:count] = 0
                c, start = at, begin
                while c + THIRTY_TWO <= end:
                    _products_32(weights, q, c, k, start, row_size, size, order, row_at, step, n)
                    c, start = c + THIRTY_TWO, start + THIRTY_TWO
                while c + EIGHT <= end:
                    _products_8(weights, q, c, k, start, row_size, size, order, row_at, step, n)
                    c, start = c + EIGHT, start + EIGHT
                while c < end:
                    _products_1(weights, q, c, k, start, row_size, size, order, row_at, step, n)
                    c, start = c + ONE, start + ONE
                top = weights[0]
                for j in range(1, count):
                    top = weights[j] if weights[j] > top else top
                for j in range(count):
                    weights[j] = (weights[j] - top) * scale
                weights[count : count + 8] = 0
                for j in range(0, n, EIGHT):
                    _exp_8(weights, unsigned(j))
                total = weights[0]
                for j in range(1, count):
                    total += weights[j]
                for j in range(count):
                    weights[j] /= total
                c, start = at, begin
                while c + THIRTY_TWO <= end:
                    _sums_32(y, c, weights, ZERO, v, start, row_size, size, order, row_at, step, n)
                    c, start = c + THIRTY_TWO, start + THIRTY_TWO
                while c + EIGHT <= end:
                    _sums_8(y, c, weights, ZERO, v, start, row_size, size, order, row_at, step, n)
                    c, start = c + EIGHT, start + EIGHT
                while c < end:
                    _sums_1(y, c, weights, ZERO, v, start, row_size, size, order, row_at, step, n)
                    c, start = c + ONE, start + ONE


@compiled
def _convolve(y, x, taps, tap_row, count, places, order, order_step, first):  # type: ignore[no-untyped-def]
    """y[r, h, c] = sum_k taps[r tap_row + h count + k] x[order[r, k order_step], first + k, h, c], flat x and taps."""
    rows, heads, width = y.shape
    channels, n, step = unsigned(heads * width), unsigned(count), unsigned(order_step)
    row_size = unsigned(places) * channels
    for task in prange((rows + TASK_ROWS - 1) // TASK_ROWS):
        for r in range(task * TASK_ROWS, min((task + 1) * TASK_ROWS, rows)):
            row_at = unsigned(r * order.shape[1])
            for h in range(heads):
                c, tap_at = unsigned((r * heads + h) * width), unsigned(r * tap_row + h * count)
                start, end = unsigned((first * heads + h) * width), c + unsigned(width)
                while c + THIRTY_TWO <= end:
                    _sums_32(y, c, taps, tap_at, x, start, row_size, channels, order, row_at, step, n)
                    c, start = c + THIRTY_TWO, start + THIRTY_TWO
                while c + EIGHT <= end:
                    _sums_8(y, c, taps, tap_at, x, start, row_size, channels, order, row_at, step, n)
                    c, start = c + EIGHT, start + EIGHT
                while c < end:
                    _sums_1(y, c, taps, tap_at, x, start, row_size, channels, order, row_at, step, n)
                    c, start = c + ONE, start + ONE


# ---------------------------------------------------------------------- on tensors


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
    assert all(part.is_contiguous() for part in (k, v)), "addresses are counted in contiguous buffers"
    q, order = q.contiguous(), order.contiguous()
    y = torch.empty_like(q)
    scale = view(q).dtype.type(1 / math.sqrt(q.shape[-1]))
    flat_k, flat_v, step = view(k).ravel(), view(v).ravel(), int(order.shape[1] > 1)
    run(_attend, view(y), view(q), flat_k, flat_v, k.shape[2], view(order), step, view(lengths), scale)
    return y


def gathered_conv(x: Tensor, taps: Tensor, order: Tensor, first: int) -> Tensor:
    assert x.is_contiguous(), "addresses are counted in a contiguous buffer"
    taps, order = taps.to(x.dtype).contiguous(), order.contiguous()
    heads, count = taps.shape[-2:]
    y = x.new_empty(len(order), heads, x.shape[-1] // heads)
    row, step = heads * count if taps.dim() == 3 else 0, int(order.shape[1] > 1)
    run(_convolve, view(y), view(x).ravel(), view(taps).ravel(), row, count, x.shape[1], view(order), step, first)
    return y.flatten(1)
