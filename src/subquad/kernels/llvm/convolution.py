"""The innermost loops of the convolution: sums of weighted rows, and products of rows."""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from subquad.kernels.llvm.vectors import fused, index_type, load, repeat, store, totals_of, vector_at


def weighted_sums(rows: int, width: int) -> Callable[..., None]:
    """y[y_at + r y_step + c] = sum_j taps[tap_at + r tap_row + j tap_step] x[x_at + (r + j) x_step + c].

    r < rows, c < width, j < count; count is at least rows. An input is loaded once for all the rows that it meets.
    """

    @intrinsic
    def add_weighted(
        _: Any,
        y: Any,
        y_at: Any,
        y_step: Any,
        x: Any,
        x_at: Any,
        x_step: Any,
        taps: Any,
        tap_at: Any,
        tap_row: Any,
        tap_step: Any,
        count: Any,
        streamed: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, y_at, y_step, x, x_at, x_step, taps, tap_at, tap_row, tap_step, count, streamed = args
            y_type, x_type, tap_type = signature.args[0], signature.args[3], signature.args[6]
            element_bytes, number = y_type.dtype.bitwidth // 8, count.type
            starts = [builder.add(y_at, builder.mul(y_step, number(r))) for r in range(rows)]
            outs = [vector_at(context, builder, y_type, y, start, width) for start in starts]
            zero = ir.Constant(outs[0].type.pointee, [0.0] * width)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]

            def add_input(place: Any, meets: range) -> None:
                """Input number `place` of the window, weighted by each row's own tap, to the rows that it meets."""
                at = builder.add(x_at, builder.mul(place, x_step))
                inputs = load(builder, vector_at(context, builder, x_type, x, at, width), element_bytes)
                for r in meets:
                    at = builder.add(tap_at, builder.mul(tap_row, number(r)))
                    at = builder.add(at, builder.mul(builder.sub(place, number(r)), tap_step))
                    tap = load(builder, vector_at(context, builder, tap_type, taps, at, 1), element_bytes)
                    weighted = fused(builder, repeat(builder, tap, width), inputs, builder.load(totals[r]))
                    builder.store(weighted, totals[r])

            ahead = rows - 1  # of so many inputs at either end, not all rows take part
            for place in range(ahead):
                add_input(number(place), range(place + 1))
            with cgutils.for_range(builder, builder.sub(count, number(ahead)), intp=number) as loop:
                add_input(builder.add(loop.index, number(ahead)), range(rows))
            for place in range(ahead):
                add_input(builder.add(count, number(place)), range(place + 1, rows))
            for total, out in zip(totals, outs, strict=True):
                store(builder, builder.load(total), out, element_bytes, streamed)
            return context.get_dummy_value()

        at = index_type
        return types.void(y, at, at, x, at, at, taps, at, at, at, at, types.boolean), generate

    return add_weighted


def dot_products(width: int, taps: int) -> Callable[..., None]:
    """out[out_at + j] += sum_c grad[grad_at + c] x[x_at + j x_step + c], c < width, j < taps * blocks.

    The products of `taps` rows gather in as many registers, whose elements are then added up together.
    """
    lanes = min(width, 8)

    @intrinsic
    def add_products(
        _: Any, out: Any, out_at: Any, grad: Any, grad_at: Any, x: Any, x_at: Any, x_step: Any, blocks: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, out_at, grad, grad_at, x, x_at, x_step, blocks = args
            out_type, grad_type, x_type = signature.args[0], signature.args[2], signature.args[4]
            element_bytes = out_type.dtype.bitwidth // 8

            def piece(array_type: Any, array: Any, index: Any, start: int) -> Any:
                start_index = builder.add(index, index.type(start))
                return load(builder, vector_at(context, builder, array_type, array, start_index, lanes), element_bytes)

            with cgutils.for_range(builder, blocks, intp=blocks.type) as loop:
                tap = builder.mul(loop.index, blocks.type(taps))
                rows = [
                    builder.add(x_at, builder.mul(builder.add(tap, tap.type(number)), x_step)) for number in range(taps)
                ]
                gradient = piece(grad_type, grad, grad_at, 0)
                products = [builder.fmul(gradient, piece(x_type, x, row, 0)) for row in rows]
                for start in range(lanes, width, lanes):
                    gradient = piece(grad_type, grad, grad_at, start)
                    inputs = [piece(x_type, x, row, start) for row in rows]
                    products = [fused(builder, gradient, *pair) for pair in zip(inputs, products, strict=True)]
                target = vector_at(context, builder, out_type, out, builder.add(out_at, tap), taps)
                total = builder.fadd(load(builder, target, element_bytes), totals_of(builder, products))
                builder.store(total, target).align = element_bytes
            return context.get_dummy_value()

        at = index_type
        return types.void(out, at, grad, at, x, at, at, at), generate

    return add_products


def correlations(width: int, taps: int) -> Callable[..., None]:
    """out[out_at + j] = sum_t sum_c grad[grad_at + t grad_step + c] x[x_at + (t + j) x_step + c], c < width, j < taps.

    t < count. The products of each j gather in a register of their own over all t, and are added up once, at the end.
    """
    lanes = min(width, 8)

    @intrinsic
    def correlate(
        _: Any,
        out: Any,
        out_at: Any,
        grad: Any,
        grad_at: Any,
        grad_step: Any,
        x: Any,
        x_at: Any,
        x_step: Any,
        count: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, out_at, grad, grad_at, grad_step, x, x_at, x_step, count = args
            out_type, grad_type, x_type = signature.args[0], signature.args[2], signature.args[5]
            element_bytes, number = out_type.dtype.bitwidth // 8, count.type
            target = vector_at(context, builder, out_type, out, out_at, taps)
            zero = ir.Constant(ir.VectorType(target.type.pointee.element, lanes), [0.0] * lanes)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(taps)]

            def piece(array_type: Any, array: Any, row: Any, start: int) -> Any:
                at = builder.add(row, number(start))
                return load(builder, vector_at(context, builder, array_type, array, at, lanes), element_bytes)

            with cgutils.for_range(builder, count, intp=number) as loop:
                own = builder.add(grad_at, builder.mul(loop.index, grad_step))
                rows = [builder.add(x_at, builder.mul(builder.add(loop.index, number(j)), x_step)) for j in range(taps)]
                for start in range(0, width, lanes):
                    gradient = piece(grad_type, grad, own, start)
                    for row, total in zip(rows, totals, strict=True):
                        product = fused(builder, gradient, piece(x_type, x, row, start), builder.load(total))
                        builder.store(product, total)
            sums = totals_of(builder, [builder.load(total) for total in totals])
            builder.store(sums, target).align = element_bytes
            return context.get_dummy_value()

        at = index_type
        return types.void(out, at, grad, at, at, x, at, at, at), generate

    return correlate
