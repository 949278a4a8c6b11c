"""The exponential function of a vector.

exp(x) = 2^n exp(r),   n = round(x / ln 2),   r = x - n ln 2,   |r| <= ln(2) / 2,   exp(r) by its power series
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subquad.kernels.llvm.vectors import fused, index_type, load, vector_at


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


def exponentials(width: int) -> Callable[..., None]:
    """out[at + i] = exp(out[at + i]), i < width."""

    @intrinsic
    def write_exponentials(_: Any, out: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out_type = signature.args[0]
            bits = out_type.dtype.bitwidth
            pointer = vector_at(context, builder, out_type, args[0], args[1], width)
            result = exponential(builder, load(builder, pointer, bits // 8), bits)
            builder.store(result, pointer).align = bits // 8
            return context.get_dummy_value()

        return types.void(out, index_type), generate

    return write_exponentials
