"""The innermost loops over keys and values that lie in different rows of a buffer.

at(j) = start + rows[row_at + j row_step] row_size + j place_size              where entry j begins, j < count
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from subquad.kernels.llvm.vectors import fused, index_type, load, repeat, totals_of, vector_at


def gathered_products(width: int) -> Callable[..., None]:
    """out[j] += sum_c x[x_at + c] keys[at(j) + c], c < width."""
    lanes = min(width, 8)

    @intrinsic
    def add_products(
        _: Any,
        out: Any,
        x: Any,
        x_at: Any,
        keys: Any,
        start: Any,
        row_size: Any,
        place_size: Any,
        rows: Any,
        row_at: Any,
        row_step: Any,
        count: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, x, x_at, keys, *place, count = args
            out_type, x_type, _, keys_type = signature.args[:4]
            element_bytes = out_type.dtype.bitwidth // 8

            def piece(array_type: Any, array: Any, index: Any, first: int) -> Any:
                pointer = vector_at(context, builder, array_type, array, builder.add(index, index.type(first)), lanes)
                return load(builder, pointer, element_bytes)

            given = [piece(x_type, x, x_at, first) for first in range(0, width, lanes)]
            with cgutils.for_range(builder, count, intp=count.type) as loop:
                at = _entry(context, builder, signature.args[7], place, loop.index)
                products = builder.fmul(given[0], piece(keys_type, keys, at, 0))
                for number, part in enumerate(given[1:], 1):
                    products = fused(builder, part, piece(keys_type, keys, at, number * lanes), products)
                target = vector_at(context, builder, out_type, out, loop.index, 1)
                total = builder.fadd(load(builder, target, element_bytes), totals_of(builder, [products]))
                builder.store(total, target).align = element_bytes
            return context.get_dummy_value()

        at = index_type
        return types.void(out, x, at, keys, at, at, at, rows, at, at, at), generate

    return add_products


def gathered_sums(width: int) -> Callable[..., None]:
    """y[y_at + c] = sum_j weights[weights_at + j] values[at(j) + c], c < width."""

    @intrinsic
    def add_weighted(
        _: Any,
        y: Any,
        y_at: Any,
        weights: Any,
        weights_at: Any,
        values: Any,
        start: Any,
        row_size: Any,
        place_size: Any,
        rows: Any,
        row_at: Any,
        row_step: Any,
        count: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, y_at, weights, weights_at, values, *place, count = args
            y_type, _, weights_type, _, values_type = signature.args[:5]
            element_bytes = y_type.dtype.bitwidth // 8
            target = vector_at(context, builder, y_type, y, y_at, width)
            total = cgutils.alloca_once_value(builder, ir.Constant(target.type.pointee, [0.0] * width))
            with cgutils.for_range(builder, count, intp=count.type) as loop:
                at = _entry(context, builder, signature.args[8], place, loop.index)
                one = load(builder, vector_at(context, builder, values_type, values, at, width), element_bytes)
                number = builder.add(weights_at, loop.index)
                pointer = vector_at(context, builder, weights_type, weights, number, 1)
                weight = repeat(builder, load(builder, pointer, element_bytes), width)
                builder.store(fused(builder, weight, one, builder.load(total)), total)
            builder.store(builder.load(total), target).align = element_bytes
            return context.get_dummy_value()

        at = index_type
        return types.void(y, at, weights, at, values, at, at, at, rows, at, at, at), generate

    return add_weighted


def _entry(context: Any, builder: Any, rows_type: Any, place: list[Any], number: Any) -> Any:
    """at(number), as the head of this file says; place: start, row_size, place_size, rows, row_at, row_step."""
    start, row_size, place_size, rows, row_at, row_step = place
    data = context.make_array(rows_type)(context, builder, rows).data
    row = builder.load(builder.gep(data, [builder.add(row_at, builder.mul(number, row_step))]))
    at = builder.add(start, builder.mul(row, row_size))
    return builder.add(at, builder.mul(number, place_size))
