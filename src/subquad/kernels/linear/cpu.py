"""Linear maps of a few rows on the CPU, compiled by numba: see `__init__.py`.

One row of x meets every weight once, so memory decides: weights are read in order, once, by all threads. More rows are
served while some weights are in the fastest cache, two at a time. The innermost loop is

    dot_products    y[r, n] = sum_k x[r, k] weight[n, k]            for 1 or 2 rows r, 1 or 4 outputs n

on float32, or on integers: 16-bit x and 8-bit weights, whose products are added in pairs, which most machines have an
instruction for. Sums of integers are exact, so no order of theirs matters; sums of floats have a fixed order.
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from subquad.kernels.linear.reference import largest_input
from subquad.kernels.numba_tools import (
    add_neighbours,
    compiled,
    fused,
    index_type,
    load,
    prefetch,
    run,
    totals_of,
    unsigned,
    vector_at,
    view,
)
from subquad.kernels.numba_tools import why_unavailable as why_unavailable

DTYPES = (torch.float32,)
OUTPUTS = 4
"""Output channels whose sums are added up and written together."""
TASK_BYTES = 1 << 14
"""Weights of one task of a thread: they stay in the fastest cache while all rows pass."""
FLOAT_LANES, INTEGER_LANES = 8, 16
"""Weights of a register."""
AHEAD_BYTES, CACHE_LINE = 1 << 12, 64
"""How far ahead weights are asked for, a line of a cache at a time: machines look no further than a page themselves."""
REGISTERS = 4
"""The innermost loop is left with what does not fill so many registers; plain code does the rest."""

# ---------------------------------------------------------------------- the innermost loop


def _dot_products(rows: int, outputs: int, together: int, registers: int) -> Callable[..., None]:
    """y[y_at + r y_step + n] = sum_k x[x_at + r step + k] weight[w_at + n step + k], k < count, as floats.

    r < rows, n < outputs, of which `together` share the loads of x. A loop reads `registers` registers of each.
    """

    @intrinsic
    def dot_products(
        _: Any, y: Any, y_at: Any, y_step: Any, x: Any, x_at: Any, weight: Any, w_at: Any, step: Any, count: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, y_at, y_step, x, x_at, weight, w_at, step, count = args
            y_type, x_type, w_type = signature.args[0], signature.args[3], signature.args[5]
            integers = isinstance(w_type.dtype, types.Integer)
            lanes = registers * (INTEGER_LANES if integers else FLOAT_LANES)
            element = ir.IntType(32) if integers else ir.FloatType()
            sums = ir.VectorType(element, lanes // 2 if integers else lanes)
            zero = ir.Constant(sums, [0 if integers else 0.0] * sums.count)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(outputs)] for _ in range(rows)]

            def piece(array_type: Any, array: Any, first: Any, row: int, place: Any) -> Any:
                at = builder.add(builder.add(first, builder.mul(step, step.type(row))), place)
                pointer = vector_at(context, builder, array_type, array, at, lanes)
                vector = load(builder, pointer, array_type.dtype.bitwidth // 8)
                return builder.sext(vector, ir.VectorType(element, lanes)) if integers else vector

            def add_products(inputs: Any, weights: Any, total: Any) -> None:
                before = builder.load(total)
                if integers:
                    after = builder.add(before, add_neighbours(builder, builder.mul(inputs, weights), None))
                else:
                    after = fused(builder, inputs, weights, before)
                builder.store(after, total)

            def ask_ahead(place: Any, row: int) -> None:
                """Asks for weights that will be read soon."""
                at = builder.add(builder.add(w_at, builder.mul(step, step.type(row))), place)
                size = w_type.dtype.bitwidth // 8
                for line in range(AHEAD_BYTES, AHEAD_BYTES + lanes * size, CACHE_LINE):
                    soon = builder.add(at, at.type(line // size))
                    prefetch(builder, vector_at(context, builder, w_type, weight, soon, 1))

            for first in range(0, outputs, together):
                some = range(first, first + together)
                with cgutils.for_range(builder, builder.udiv(count, count.type(lanes)), intp=count.type) as loop:
                    place = builder.mul(loop.index, count.type(lanes))
                    weights = [piece(w_type, weight, w_at, n, place) for n in some]
                    if rows == 1:  # memory decides, and a byte a weight is used up faster than it comes
                        ask_ahead(place, first)
                    for r in range(rows):
                        inputs = piece(x_type, x, x_at, r, place)
                        for n, own in zip(some, weights, strict=True):
                            add_products(inputs, own, totals[r][n])
            for r in range(rows):
                of_row = totals_of(builder, [builder.load(total) for total in totals[r]])
                of_row = builder.sitofp(of_row, ir.VectorType(ir.FloatType(), outputs)) if integers else of_row
                at = builder.add(y_at, builder.mul(y_step, y_step.type(r)))
                builder.store(of_row, vector_at(context, builder, y_type, y, at, outputs)).align = 4
            return context.get_dummy_value()

        at = index_type
        return types.void(y, at, at, x, at, weight, at, at, at), generate

    return dot_products


# One row reads one output's weights after the other's, as memory serves them fastest. Two rows are limited by loads of
# x as well, which two outputs share.
_dots_1_by_1, _dots_1_by_4 = _dot_products(1, 1, 1, REGISTERS), _dot_products(1, OUTPUTS, 1, REGISTERS)
_dots_2_by_4 = _dot_products(2, OUTPUTS, 2, 2)

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
