"""The innermost loop of linear maps: products of rows of inputs with rows of weights, of floats or of integers."""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from subquad.kernels.llvm.vectors import add_neighbours, fused, index_type, load, prefetch, totals_of, vector_at

FLOAT_LANES, INTEGER_LANES = 8, 16
"""Weights of a register."""
AHEAD_BYTES, CACHE_LINE = 1 << 12, 64
"""How far ahead weights are asked for, a line of a cache at a time: machines look no further than a page themselves."""


def dot_products(rows: int, outputs: int, together: int, registers: int) -> Callable[..., None]:
    """y[y_at + r y_step + n] = sum_k x[x_at + r step + k] weight[w_at + n step + k], k < count, as floats.

    r < rows, n < outputs, of which `together` share the loads of x. A loop reads `registers` registers of each.
    """

    @intrinsic
    def write_products(
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

    return write_products
