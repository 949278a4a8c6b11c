"""Linear maps of a few rows on the CPU, compiled by numba: see `__init__.py`.

One row of x meets every weight once, so memory decides: weights are read in order, once, by all threads. More rows are
served while some weights are in the fastest cache, two at a time. The innermost loop is

    dot_products    y[r, n] = sum_k x[r, k] weight[n, k]            for 1 or 2 rows r, 1 or 4 outputs n

on float32, or on integers: 16-bit x and 8-bit weights, whose products are added in pairs, which most machines have an
instruction for. Sums of integers are exact, so no order of theirs matters; sums of floats have a fixed order.
"""

from collections.abc import Callable

import numpy as np
import torch
from numba import prange
from torch import Tensor

from subquad.kernels.linear.reference import largest_input
from subquad.kernels.llvm.linear import FLOAT_LANES, INTEGER_LANES, dot_products
from subquad.kernels.llvm.vectors import unsigned
from subquad.kernels.numba_tools import compiled, run, view
from subquad.kernels.numba_tools import why_unavailable as why_unavailable

DTYPES = (torch.float32,)
OUTPUTS = 4
"""Output channels whose sums are added up and written together."""
TASK_BYTES = 1 << 14
"""Weights of one task of a thread: they stay in the fastest cache while all rows pass."""
REGISTERS = 4
"""The innermost loop is left with what does not fill so many registers; plain code does the rest."""

# One row reads one output's weights after the other's, as memory serves them fastest. Two rows are limited by loads of
# x as well, which two outputs share.
_dots_1_by_1, _dots_1_by_4 = dot_products(1, 1, 1, REGISTERS), dot_products(1, OUTPUTS, 1, REGISTERS)
_dots_2_by_4 = dot_products(2, OUTPUTS, 2, 2)

# ---------------------------------------------------------------------- the loops over outputs and rows


@compiled
def _multiply(y, x, weight, x_scale, w_scale, bias, lanes, task_outputs):  # type: ignore[no-untyped-def]
    """y[r, n] = x_scale[r] w_scale[n] sum_k x[r, k] weight[n, k] + bias[n]; an empty scale or bias is left out."""
    rows, width = x.shape
    outputs = weight.shape[0]
    done = width - width % (lanes * REGISTERS)  # by the innermost loop; the rest below
    step, y_step, count = unsigned(width), unsigned(outputs), unsigned(done)
    for task in prange((outputs + task_outputs - 1) // task_outputs):
        first = task * task_outputs
        last = min(first + task_outputs, outputs)
        for r in range(0, rows, 2):
            x_at = unsigned(r * width)
            for n in range(first, last - OUTPUTS + 1, OUTPUTS):
                y_at, w_at = unsigned(r * outputs + n), unsigned(n * width)
                if r + 1 < rows:
                    _dots_2_by_4(y, y_at, y_step, x, x_at, weight, w_at, step, count)
                else:
                    _dots_1_by_4(y, y_at, y_step, x, x_at, weight, w_at, step, count)
            for row in range(r, min(r + 2, rows)):
                for n in range(last - (last - first) % OUTPUTS, last):
                    y_at, w_at = unsigned(row * outputs + n), unsigned(n * width)
                    _dots_1_by_1(y, y_at, y_step, x, unsigned(row * width), weight, w_at, step, count)
                for n in range(first, last):
                    total = y[row, n]
                    for k in range(done, width):
                        total += x[row, k] * weight[n, k]
                    if w_scale.size:
                        total *= x_scale[row] * w_scale[n]
                    y[row, n] = total + bias[n] if bias.size else total


@compiled
def _multiply_rounded(y, x, weight, w_scale, bias, largest, task_outputs):  # type: ignore[no-untyped-def]
    """`_multiply` of rows rounded to integers, of which the largest in magnitude is `largest`."""
    rows, width = x.shape
    rounded, x_scale = np.empty((rows, width), np.int16), np.empty(rows, np.float32)
    for r in range(rows):  # too little work to share: the threads would meet once more for it
        top = np.float32(0.0)
        for k in range(width):
            top = max(top, abs(x[r, k]))
        x_scale[r] = top / largest
        factor = np.float32(largest / top) if top > 0 else np.float32(0.0)
        for k in range(width):
            rounded[r, k] = np.int16(np.rint(x[r, k] * factor))
            if np.isnan(x[r, k]):  # no integer stands for it
                x_scale[r] = x[r, k]
    _multiply(y, rounded, weight, x_scale, w_scale, bias, INTEGER_LANES, task_outputs)


# ---------------------------------------------------------------------- on tensors; weights are contiguous

_NONE = np.empty(0, np.float32)


def linear_by(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> (..., out), of weight (out, in), bias (out,), all in float32. Views of them are made once."""
    weights, biases, task = view(weight), _view_or_none(bias), _task_outputs(weight)

    def multiply(y: np.ndarray, x: np.ndarray) -> None:
        run(_multiply, y, x, weights, _NONE, _NONE, biases, FLOAT_LANES, task)

    return _of_rows(multiply, weight)


def int8_linear_by(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (..., in) float32 -> (..., out), of weight (out, in) int8, scale and bias (out,) float32.

    Rows of x are rounded to integers of magnitude `largest_input` at most.
    """
    largest = largest_input(weight.shape[1])
    weights, scales, biases, task = view(weight), view(scale), _view_or_none(bias), _task_outputs(weight)

    def multiply(y: np.ndarray, x: np.ndarray) -> None:
        run(_multiply_rounded, y, x, weights, scales, biases, largest, task)

    return _of_rows(multiply, weight)


def _of_rows(multiply: Callable[[np.ndarray, np.ndarray], None], weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> (..., out) by multiply(y, x) of contiguous rows. Arrays are reshaped: tensors take much longer."""
    outputs, width = weight.shape

    def linear(x: Tensor) -> Tensor:
        assert x.shape[-1] == width, f"{x.shape[-1]} channels of {width}"  # a kernel would read and write beyond them
        y = torch.empty(*x.shape[:-1], outputs)
        rows = np.ascontiguousarray(view(x).reshape(-1, width))
        multiply(view(y).reshape(-1, outputs), rows)
        return y

    return linear


def _view_or_none(bias: Tensor | None) -> np.ndarray:
    return _NONE if bias is None else view(bias)


def _task_outputs(weight: Tensor) -> int:
    """Outputs of one task: a multiple of OUTPUTS, whose weights fill TASK_BYTES."""
    fitting = TASK_BYTES // (weight.shape[1] * weight.element_size())
    return max(OUTPUTS, fitting // OUTPUTS * OUTPUTS)
