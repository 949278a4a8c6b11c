"""The innermost loops over long rows: their largest entries, sums of exponentials, and comparisons."""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subquad.kernels.llvm.exponential import exponential
from subquad.kernels.llvm.vectors import index_type, load, repeat, vector_at


def raising(width: int) -> Callable[..., None]:
    """tops[i] = max(tops[i], values[at + i]), i < width."""

    @intrinsic
    def raise_tops(_: Any, tops: Any, values: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (tops_type, values_type, _), (tops, values, at) = signature.args, args
            size = values_type.dtype.bitwidth // 8
            pointer = vector_at(context, builder, tops_type, tops, at.type(0), width)
            x = load(builder, vector_at(context, builder, values_type, values, at, width), size)
            top = load(builder, pointer, size)
            builder.store(builder.select(builder.fcmp_ordered(">", x, top), x, top), pointer).align = size
            return context.get_dummy_value()

        return types.void(tops, values, index_type), generate

    return raise_tops


def adding(width: int) -> Callable[..., None]:
    """sums[i] += exp(values[at + i] - shifts[row]), i < width."""

    @intrinsic
    def add_exponentials(_: Any, sums: Any, values: Any, at: Any, shifts: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (sums_type, values_type, _, shifts_type, _), (sums, values, at, shifts, row) = signature.args, args
            size = values_type.dtype.bitwidth // 8
            shift = load(builder, vector_at(context, builder, shifts_type, shifts, row, 1), size)
            x = load(builder, vector_at(context, builder, values_type, values, at, width), size)
            x = builder.fsub(x, repeat(builder, shift, width))
            pointer = vector_at(context, builder, sums_type, sums, row.type(0), width)
            total = builder.fadd(load(builder, pointer, size), exponential(builder, x, 8 * size))
            builder.store(total, pointer).align = size
            return context.get_dummy_value()

        return types.void(sums, values, index_type, shifts, index_type), generate

    return add_exponentials


def exponentiating(width: int) -> Callable[..., None]:
    """values[at + i] = exp(values[at + i] - shifts[row]), and sums[i] += that, i < width."""

    @intrinsic
    def write_exponentials(_: Any, sums: Any, values: Any, at: Any, shifts: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (sums_type, values_type, _, shifts_type, _), (sums, values, at, shifts, row) = signature.args, args
            size = values_type.dtype.bitwidth // 8
            shift = load(builder, vector_at(context, builder, shifts_type, shifts, row, 1), size)
            place = vector_at(context, builder, values_type, values, at, width)
            x = builder.fsub(load(builder, place, size), repeat(builder, shift, width))
            e = exponential(builder, x, 8 * size)
            builder.store(e, place).align = size
            pointer = vector_at(context, builder, sums_type, sums, row.type(0), width)
            builder.store(builder.fadd(load(builder, pointer, size), e), pointer).align = size
            return context.get_dummy_value()

        return types.void(sums, values, index_type, shifts, index_type), generate

    return write_exponentials


def raising_and_adding(width: int) -> Callable[..., None]:
    """tops[i] = max(tops[i], values[at + i]), and sums[i] += values[at + i], i < width."""

    @intrinsic
    def raise_and_add(_: Any, tops: Any, sums: Any, values: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (tops_type, sums_type, values_type, _), (tops, sums, values, at) = signature.args, args
            size = values_type.dtype.bitwidth // 8
            x = load(builder, vector_at(context, builder, values_type, values, at, width), size)
            pointer = vector_at(context, builder, tops_type, tops, at.type(0), width)
            top = load(builder, pointer, size)
            builder.store(builder.select(builder.fcmp_ordered(">", x, top), x, top), pointer).align = size
            pointer = vector_at(context, builder, sums_type, sums, at.type(0), width)
            builder.store(builder.fadd(load(builder, pointer, size), x), pointer).align = size
            return context.get_dummy_value()

        return types.void(tops, sums, values, index_type), generate

    return raise_and_add


def comparing(width: int) -> Callable[..., bool]:
    """Whether any of values[at + i], i < width, is above limits[place]."""

    @intrinsic
    def any_above(_: Any, values: Any, at: Any, limits: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (values_type, _, limits_type, _), (values, at, limits, place) = signature.args, args
            size = values_type.dtype.bitwidth // 8
            limit = load(builder, vector_at(context, builder, limits_type, limits, place, 1), size)
            x = load(builder, vector_at(context, builder, values_type, values, at, width), size)
            above = builder.fcmp_ordered(">", x, repeat(builder, limit, width))
            bits = builder.bitcast(above, ir.IntType(width))
            return builder.icmp_unsigned("!=", bits, bits.type(0))

        return types.boolean(values, index_type, limits, index_type), generate

    return any_above
