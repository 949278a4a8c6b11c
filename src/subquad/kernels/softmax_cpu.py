"""Softmax over short rows, such as the taps of a head, compiled by numba.

torch's softmax costs a fixed time per row, which for 3 to 31 taps is more than the convolution itself. Here the rows'
largest entries and sums are scalar loops, and the exponentials between them run over many rows at once, as vectors:

    exp(x) = 2^n exp(r),   n = round(x / ln 2),   r = x - n ln 2,   |r| <= ln(2) / 2,   exp(r) by its power series
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from subquad.kernels.numba_tools import (
    EIGHT,
    ONE,
    SIXTY_FOUR,
    compiled,
    fused,
    index_type,
    load,
    plain,
    run,
    unsigned,
    vector_at,
    view,
)

BLOCK = 128
"""Rows of one task of a thread: their entries stay in the fastest cache between the three passes."""


class Format(NamedTuple):
    """What `exp` knows of a floating-point format."""

    mantissa: int
    """Bits; the exponent begins above them."""
    bias: int
    """What is added to an exponent when it is stored."""
    terms: int
    """Of the power series, so that what is left out is below half a unit of the last place."""
    lowest: float
    """Below this, exp is smaller than the smallest normal number, and taken as zero."""


FORMATS = {32: Format(23, 127, 8, -87.0), 64: Format(52, 1023, 14, -708.0)}


def exponential(builder: Any, x: Any, bits: int) -> Any:
    """exp of a vector of numbers <= 0; NaN stays NaN."""
    form, width = FORMATS[bits], x.type.count
    integer = ir.VectorType(ir.IntType(bits), width)

    def number(value: float) -> Any:
        return ir.Constant(x.type, [value] * width)

    def whole(value: int) -> Any:
        return ir.Constant(integer, [value] * width)

    # Beside so large a number no fraction has room: adding it rounds, and leaves n in the last bits of the sum.
    large = number(1.5 * 2.0**form.mantissa)
    shifted = builder.fadd(builder.fmul(x, number(1 / math.log(2))), large)
    n = builder.fsub(shifted, large)
    upper = round(math.log(2) * 2 ** (form.mantissa - 8)) / 2 ** (form.mantissa - 8)  # n * upper is exact
    r = fused(builder, n, number(-upper), x)
    r = fused(builder, n, number(upper - math.log(2)), r)
    series = number(1 / math.factorial(form.terms - 1))
    for power in reversed(range(form.terms - 1)):
        series = fused(builder, series, r, number(1 / math.factorial(power)))
    exponent = builder.add(builder.bitcast(shifted, integer), whole(form.bias))
    power_of_two = builder.bitcast(builder.shl(exponent, whole(form.mantissa)), x.type)
    too_low = builder.fcmp_ordered("<", x, number(form.lowest))
    return builder.select(too_low, number(0.0), builder.fmul(series, power_of_two))


def _exponentials(width: int) -> Callable[..., None]:
    """out[at + i] = exp(out[at + i]), i < width."""

    @intrinsic
    def exponentials(_: Any, out: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out_type = signature.args[0]
            bits = out_type.dtype.bitwidth
            pointer = vector_at(context, builder, out_type, args[0], args[1], width)
            result = exponential(builder, load(builder, pointer, bits // 8), bits)
            builder.store(result, pointer).align = bits // 8
            return context.get_dummy_value()

        return types.void(out, index_type), generate

    return exponentials


_exp_64, _exp_8, _exp_1 = (_exponentials(width) for width in (64, 8, 1))


@compiled
def _softmax_rows(out, logits, count):  # type: ignore[no-untyped-def]
    """out[r, k] = exp(logits[r, k]) / sum_j exp(logits[r, j]) of flat arrays with `count` entries a row."""
    rows, n = logits.size // count, unsigned(count)
    for task in prange((rows + BLOCK - 1) // BLOCK):
        start, end = unsigned(task * BLOCK * count), unsigned(min((task + 1) * BLOCK, rows) * count)
        for row in range(start, end, n):
            largest = logits[row]
            for i in range(row, row + n):
                largest = logits[i] if logits[i] > largest else largest
            for i in range(row, row + n):
                out[i] = logits[i] - largest
        at = start
        while at + SIXTY_FOUR <= end:
            _exp_64(out, at)
            at += SIXTY_FOUR
        while at + EIGHT <= end:
            _exp_8(out, at)
            at += EIGHT
        while at < end:
            _exp_1(out, at)
            at += ONE
        for row in range(start, end, n):
            total = out[row]
            for i in range(row + ONE, row + n):
                total += out[i]
            for i in range(row, row + n):
                out[i] /= total


@compiled
def _gradient_rows(grad, taps, count):  # type: ignore[no-untyped-def]
    """grad[r, k] = taps[r, k] (grad[r, k] - sum_j taps[r, j] grad[r, j]), in place, of flat arrays."""
    rows, n = taps.size // count, unsigned(count)
    for task in prange((rows + BLOCK - 1) // BLOCK):
        start, end = unsigned(task * BLOCK * count), unsigned(min((task + 1) * BLOCK, rows) * count)
        for row in range(start, end, n):
            mean = taps[row] * grad[row]
            for i in range(row + ONE, row + n):
                mean += taps[i] * grad[i]
            for i in range(row, row + n):
                grad[i] = taps[i] * (grad[i] - mean)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis, in float32 or in float64 when logits are."""
    logits = plain(logits)
    out = torch.empty_like(logits)
    run(_softmax_rows, view(out).ravel(), view(logits).ravel(), logits.shape[-1])
    return out


def softmax_gradient_(grad: Tensor, taps: Tensor) -> Tensor:
    """From the gradient of taps = softmax(logits) to that of the logits; overwrites and returns `grad`."""
    assert grad.is_contiguous()
    run(_gradient_rows, view(grad).ravel(), view(plain(taps)).ravel(), taps.shape[-1])
    return grad
