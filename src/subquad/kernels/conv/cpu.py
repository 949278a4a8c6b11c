"""The convolution of this folder on the CPU, compiled by numba.

Outputs are made row by row: the channels of a head stay in registers while all taps pass, so that every input is
read from cache K times and from memory once, every output is written once, and nothing is unfolded, padded or packed.
The innermost loops are

    weighted_sums    y[0 : width]  = sum_j taps[j] * x_j[0 : width]          forward and input gradient
    dot_products     out[j]       += sum_c grad[c] * x_j[c]                  tap gradient        x_j: row j of a window

Many taps are limited by loads from the second cache, and then two neighbouring rows, which share all inputs but two,
are made at once. With few taps reading one row after the other is what memory serves fastest.

Results do not depend on the number of threads: rows belong to fixed segments, whose sums are added in order.
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable, Sequence
from typing import Any

import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from subquad.kernels.numba_tools import (
    ALIGNMENT,
    EIGHT,
    ONE,
    SIXTY_FOUR,
    THIRTY_TWO,
    compiled,
    fence,
    fused,
    index_type,
    load,
    plain,
    repeat,
    run,
    store,
    totals_of,
    unsigned,
    vector_at,
    view,
)
from subquad.kernels.numba_tools import why_unavailable as why_unavailable
from subquad.kernels.softmax_cpu import softmax as softmax
from subquad.kernels.softmax_cpu import softmax_gradient_ as softmax_gradient_

SEGMENT = 64
"""Rows of one task of a thread."""
PAIRED = 16
"""Taps from which on two rows are made at once."""
STREAMED_BYTES = 1 << 24
"""Outputs above this size leave the caches anyway: writing around them saves reading what is overwritten."""

# ---------------------------------------------------------------------- the innermost loops


def _weighted_sums(rows: int, width: int) -> Callable[..., None]:
    """y[y_at + r step + c] = sum_j taps[tap_at + r tap_row + j tap_step] x[x_at + (r + j) step + c].

    r < rows, c < width, j < count; count is at least rows. An input is loaded once for all the rows that it meets.
    """

    @intrinsic
    def weighted_sums(
        _: Any,
        y: Any,
        y_at: Any,
        x: Any,
        x_at: Any,
        step: Any,
        taps: Any,
        tap_at: Any,
        tap_row: Any,
        tap_step: Any,
        count: Any,
        streamed: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, y_at, x, x_at, step, taps, tap_at, tap_row, tap_step, count, streamed = args
            y_type, x_type, tap_type = signature.args[0], signature.args[2], signature.args[5]
            element_bytes, number = y_type.dtype.bitwidth // 8, count.type
            starts = [builder.add(y_at, builder.mul(step, number(r))) for r in range(rows)]
            outs = [vector_at(context, builder, y_type, y, start, width) for start in starts]
            zero = ir.Constant(outs[0].type.pointee, [0.0] * width)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]

            def add_input(place: Any, meets: range) -> None:
                """Input number `place` of the window, weighted by each row's own tap, to the rows that it meets."""
                at = builder.add(x_at, builder.mul(place, step))
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
        return types.void(y, at, x, at, at, taps, at, at, at, at, types.boolean), generate

    return weighted_sums


def _dot_products(width: int, taps: int) -> Callable[..., None]:
    """out[out_at + j] += sum_c grad[grad_at + c] x[x_at + j x_step + c], c < width, j < taps * blocks.

    The products of `taps` rows gather in as many registers, whose elements are then added up together.
    """
    lanes = min(width, 8)

    @intrinsic
    def dot_products(
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

    return dot_products


# Eight registers of eight float32 for sums leave room for what is multiplied: 1 x 64 or 2 x 32 outputs, 8 products.
_sum_64, _sum_32, _sum_8, _sum_1 = (_weighted_sums(1, width) for width in (64, 32, 8, 1))
_sums_32, _sums_8, _sums_1 = (_weighted_sums(2, width) for width in (32, 8, 1))
_dots_64, _dots_32, _dots_8, _dots_1 = (_dot_products(width, 1) for width in (64, 32, 8, 1))
_dots_64_by_8, _dots_32_by_8 = (_dot_products(width, 8) for width in (64, 32))

# ---------------------------------------------------------------------- the loops over rows and heads


@compiled
def _weigh_rows(y, x, taps, heads, count, before, tap_batch, tap_row, tap_first, tap_step, streamed):  # type: ignore[no-untyped-def]
    """y[b, t, c] = sum_k taps[b tap_batch + t tap_row + h count + tap_first + k tap_step] x[b, t - before + k, c]."""
    batch, length, channels = y.shape
    rows, width = x.shape[1], channels // heads
    step, by_row, by_tap = unsigned(channels), unsigned(tap_row), unsigned(tap_step)
    segments = (length + SEGMENT - 1) // SEGMENT
    for task in prange(batch * segments):
        b, t = task // segments, task % segments * SEGMENT
        last = min(t + SEGMENT, length)
        while t < last:
            k = max(0, before - t)  # the first tap that meets an input
            met = unsigned(max(0, min(count, rows + before - t) - k))
            paired = count >= PAIRED and t + 1 < last and k == 0 and t + 1 - before + count <= rows
            for h in range(heads):
                y_at = unsigned((b * length + t) * channels + h * width)
                x_at = unsigned((b * rows + t - before + k) * channels + h * width)
                tap_at = unsigned(b * tap_batch + t * tap_row + h * count + tap_first + k * tap_step)
                end = y_at + unsigned(width)
                if paired:
                    while y_at + THIRTY_TWO <= end:
                        _sums_32(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + THIRTY_TWO, x_at + THIRTY_TWO
                    while y_at + EIGHT <= end:
                        _sums_8(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + EIGHT, x_at + EIGHT
                    while y_at < end:
                        _sums_1(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + ONE, x_at + ONE
                else:
                    while y_at + SIXTY_FOUR <= end:
                        _sum_64(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + SIXTY_FOUR, x_at + SIXTY_FOUR
                    while y_at + THIRTY_TWO <= end:
                        _sum_32(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + THIRTY_TWO, x_at + THIRTY_TWO
                    while y_at + EIGHT <= end:
                        _sum_8(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + EIGHT, x_at + EIGHT
                    while y_at < end:
                        _sum_1(y, y_at, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                        y_at, x_at = y_at + ONE, x_at + ONE
            t += 2 if paired else 1
        if streamed:
            fence()  # type: ignore[call-arg]


@compiled
def _multiply_rows(out, grad, x, heads, count, before, out_task, out_row):  # type: ignore[no-untyped-def]
    """out[task out_task + (b length + t) out_row + h count + k] += sum_c grad[b, t, c] x[b, t - before + k, c]."""
    batch, length, channels = grad.shape
    rows, width = x.shape[1], channels // heads
    step = unsigned(channels)
    segments = (length + SEGMENT - 1) // SEGMENT
    for task in prange(batch * segments):
        b, start = task // segments, task % segments * SEGMENT
        for t in range(start, min(start + SEGMENT, length)):
            k = max(0, before - t)
            met = unsigned(max(0, min(count, rows + before - t) - k))
            eights = met // EIGHT
            done = eights * EIGHT
            rest, skipped = met - done, done * step
            for h in range(heads):
                at = unsigned(task * out_task + (b * length + t) * out_row + h * count + k)
                x_at = unsigned((b * rows + t - before + k) * channels + h * width)
                grad_at = unsigned((b * length + t) * channels + h * width)
                end = grad_at + unsigned(width)
                while grad_at + SIXTY_FOUR <= end:
                    _dots_64_by_8(out, at, grad, grad_at, x, x_at, step, eights)
                    _dots_64(out, at + done, grad, grad_at, x, x_at + skipped, step, rest)
                    grad_at, x_at = grad_at + SIXTY_FOUR, x_at + SIXTY_FOUR
                while grad_at + THIRTY_TWO <= end:
                    _dots_32_by_8(out, at, grad, grad_at, x, x_at, step, eights)
                    _dots_32(out, at + done, grad, grad_at, x, x_at + skipped, step, rest)
                    grad_at, x_at = grad_at + THIRTY_TWO, x_at + THIRTY_TWO
                while grad_at + EIGHT <= end:
                    _dots_8(out, at, grad, grad_at, x, x_at, step, met)
                    grad_at, x_at = grad_at + EIGHT, x_at + EIGHT
                while grad_at < end:
                    _dots_1(out, at, grad, grad_at, x, x_at, step, met)
                    grad_at, x_at = grad_at + ONE, x_at + ONE


# ---------------------------------------------------------------------- on tensors


def forward(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:
    """y[b, t, c] = sum_k taps[(b, t,) head(c), k] * x[b, t - before + k, c]: (B, length, C)."""
    row = 0 if taps.dim() == 2 else taps.shape[-2] * taps.shape[-1]
    return _weighted_rows(x, taps, before, length, (length * row, row, 0, 1))


def input_gradient(grad: Tensor, taps: Tensor, before: int, size: int) -> Tensor:
    """The same convolution in the other direction: input s meets tap K - 1 - j of output s - (K - 1 - before) + j."""
    row = 0 if taps.dim() == 2 else taps.shape[-2] * taps.shape[-1]
    last = taps.shape[-1] - 1
    mirrored = last - before
    return _weighted_rows(grad, taps, mirrored, size, (grad.shape[1] * row, row, last - mirrored * row, row - 1))


def tap_gradient(grad: Tensor, x: Tensor, before: int, taps_shape: Sequence[int]) -> Tensor:
    """sum_c grad[b, t, c] x[b, t - before + k, c] over each head's channels, and over B and T for shared taps."""
    grad, x = plain(grad), plain(x)
    heads, count = taps_shape[-2:]
    if len(taps_shape) == 4:
        own = torch.zeros(taps_shape, dtype=x.dtype)
        run(_multiply_rows, view(own).ravel(), view(grad), view(x), heads, count, before, 0, heads * count)
        return own
    segments = grad.shape[0] * -(-grad.shape[1] // SEGMENT)
    parts = torch.zeros(segments, heads, count, dtype=x.dtype)
    run(_multiply_rows, view(parts).ravel(), view(grad), view(x), heads, count, before, heads * count, 0)
    return parts.sum(0, dtype=torch.float64).to(x.dtype)


def _weighted_rows(x: Tensor, taps: Tensor, before: int, length: int, tap_address: tuple[int, int, int, int]) -> Tensor:
    dtype, (batch, _, channels), (heads, count) = x.dtype, x.shape, taps.shape[-2:]
    x, taps = plain(x), plain(taps)
    y = torch.empty(batch, length, channels, dtype=x.dtype)
    aligned = y.data_ptr() % ALIGNMENT == 0 and channels // heads * y.element_size() % ALIGNMENT == 0
    streamed = aligned and y.nbytes > STREAMED_BYTES
    run(_weigh_rows, view(y), view(x), view(taps).ravel(), heads, count, before, *tap_address, streamed)
    return y.to(dtype)
