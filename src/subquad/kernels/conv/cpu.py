"""The convolution of this folder on the CPU, compiled by numba.

Outputs are made row by row: the channels of a head stay in registers while all taps pass, so that every input is
read from cache K times and from memory once, every output is written once, and nothing is unfolded. The innermost loops
are

    weighted_sums    y[0 : width]  = sum_j taps[j] * x_j[0 : width]          forward and input gradient
    dot_products     out[j]       += sum_c grad[c] * x_j[c]                  gradient of a row's own taps
    correlations     out[j]        = sum_t sum_c grad_t[c] * x_(t + j)[c]    gradient of shared taps

where x_j is row j of a window.

With many taps, or heads of few channels, the rows that a segment of outputs reads are first copied side by side, some
channels of a head at a time. Where they lie, rows are some power of two of bytes apart, and a cache keeps only a few
lines of such addresses: with 1,024 channels eight of the 31 rows of a window. Of the copy two to eight neighbouring
rows, which share most of their inputs, are made at once. With few taps reading one row after the other is what memory
serves fastest.

torch's softmax costs a fixed time per row, which for 3 to 31 taps is more than the convolution itself. Here the rows'
largest entries and sums are scalar loops, and the exponentials between them run over many rows at once, as vectors.

Results do not depend on the number of threads: rows belong to fixed segments, whose sums are added in order.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from subquad.kernels.llvm.convolution import correlations, dot_products, weighted_sums
from subquad.kernels.llvm.exponential import exponentials
from subquad.kernels.llvm.vectors import ALIGNMENT, EIGHT, ONE, SIXTY_FOUR, THIRTY_TWO, fence, unsigned
from subquad.kernels.numba_tools import compiled, plain, run, view
from subquad.kernels.numba_tools import why_unavailable as why_unavailable

SEGMENT = 64
"""Rows of one task of a thread."""
PAIRED = 16
"""Taps from which on several rows are made at once."""
STREAMED_BYTES = 1 << 24
"""Outputs above this size leave the caches anyway: writing around them saves reading what is overwritten."""

# Eight registers of eight float32 for sums leave room for what is multiplied.
_sum_64, _sum_32, _sum_16, _sum_8, _sum_1 = (weighted_sums(1, width) for width in (64, 32, 16, 8, 1))
_sums_32, _sums_16, _sums_8 = (weighted_sums(64 // width, width) for width in (32, 16, 8))
_dots_64, _dots_32, _dots_16, _dots_8, _dots_1 = (dot_products(width, 1) for width in (64, 32, 16, 8, 1))
_dots_64_by_8, _dots_32_by_8, _dots_16_by_8, _dots_8_by_8 = (dot_products(width, 8) for width in (64, 32, 16, 8))
_correlate_32, _correlate_16, _correlate_8, _correlate_1 = (
    correlations(width, min(width, 8)) for width in (32, 16, 8, 1)
)

# ---------------------------------------------------------------------- the loops over rows and heads


@compiled
def _weigh_rows(y, x, taps, heads, count, before, tap_batch, tap_row, tap_first, tap_step, streamed):  # type: ignore[no-untyped-def]
    """y[b, t, c] = sum_k taps[b tap_batch + t tap_row + h count + tap_first + k tap_step] x[b, t - before + k, c]."""
    batch, length, channels = y.shape
    rows, width = x.shape[1], channels // heads
    step, by_row, by_tap = unsigned(channels), unsigned(tap_row), unsigned(tap_step)
    segments = (length + SEGMENT - 1) // SEGMENT
    for task in prange(batch * segments):
        b, start = task // segments, task % segments * SEGMENT
        for t in range(start, min(start + SEGMENT, length)):
            k = max(0, before - t)  # the first tap that meets an input
            met = unsigned(max(0, min(count, rows + before - t) - k))
            for h in range(heads):
                y_at = unsigned((b * length + t) * channels + h * width)
                x_at = unsigned((b * rows + t - before + k) * channels + h * width)
                tap_at = unsigned(b * tap_batch + t * tap_row + h * count + tap_first + k * tap_step)
                end = y_at + unsigned(width)
                while y_at + SIXTY_FOUR <= end:
                    _sum_64(y, y_at, step, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                    y_at, x_at = y_at + SIXTY_FOUR, x_at + SIXTY_FOUR
                while y_at + THIRTY_TWO <= end:
                    _sum_32(y, y_at, step, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                    y_at, x_at = y_at + THIRTY_TWO, x_at + THIRTY_TWO
                while y_at + EIGHT <= end:
                    _sum_8(y, y_at, step, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                    y_at, x_at = y_at + EIGHT, x_at + EIGHT
                while y_at < end:
                    _sum_1(y, y_at, step, x, x_at, step, taps, tap_at, by_row, by_tap, met, streamed)
                    y_at, x_at = y_at + ONE, x_at + ONE
        if streamed:
            fence()  # type: ignore[call-arg]


@numba.njit
def _block_width(left):  # type: ignore[no-untyped-def]
    """Of so many channels that are left of a head, how many are worked on next."""
    if left >= 32:
        return 32
    if left >= 16:
        return 16
    return 8 if left >= 8 else 1


@numba.njit
def _copy_window(block, x, first, step, rows, start, count, width):  # type: ignore[no-untyped-def]
    """block[r width + c] = x[first + (start + r) step + c] for r < count, of flat arrays; zero where x has no row."""
    wide = unsigned(width)
    for r in range(count):
        to, row = unsigned(r) * wide, start + r
        if 0 <= row < rows:
            at = first + unsigned(row) * step
            for c in range(wide):
                block[to + c] = x[at + c]
        else:
            for c in range(wide):
                block[to + c] = 0


@compiled
def _weigh_blocks(y, x, taps, heads, count, before, tap_batch, tap_row, tap_first, tap_step, streamed, beyond):  # type: ignore[no-untyped-def]
    """`_weigh_rows` of several rows at once, by blocks of channels that are copied side by side.

    beyond: whether there are taps for the rows that x does not have.
    """
    batch, length, channels = y.shape
    rows, width = x.shape[1], channels // heads
    step, by_row, by_tap, met = unsigned(channels), unsigned(tap_row), unsigned(tap_step), unsigned(count)
    flat = x.reshape(x.size)
    segments = (length + SEGMENT - 1) // SEGMENT
    for task in prange(batch * segments):
        b, start = task // segments, task % segments * SEGMENT
        last = min(start + SEGMENT, length)
        block = np.empty((SEGMENT + count) * 32, x.dtype)
        for h in range(heads):
            first = h * width
            while first < (h + 1) * width:
                wide = _block_width((h + 1) * width - first)
                at = unsigned(b * rows * channels + first)
                _copy_window(block, flat, at, step, rows, start - before, last - start + count - 1, wide)
                together, x_step, t = 64 // wide, unsigned(wide), start
                while t < last:
                    y_at = unsigned((b * length + t) * channels + first)
                    x_at = unsigned((t - start) * wide)
                    tap_at = unsigned(b * tap_batch + t * tap_row + h * count + tap_first)
                    inside = beyond or (t >= before and t + together - 1 - before + count <= rows)
                    if inside and wide > 1 and together <= count and t + together <= last:
                        if wide == 32:
                            _sums_32(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, met, streamed)
                        elif wide == 16:
                            _sums_16(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, met, streamed)
                        else:
                            _sums_8(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, met, streamed)
                        t += together
                        continue
                    k = max(0, before - t)
                    some = unsigned(max(0, min(count, rows + before - t) - k))
                    x_at, tap_at = x_at + unsigned(k * wide), tap_at + unsigned(k * tap_step)
                    if wide == 32:
                        _sum_32(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, some, streamed)
                    elif wide == 16:
                        _sum_16(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, some, streamed)
                    elif wide == 8:
                        _sum_8(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, some, streamed)
                    else:
                        _sum_1(y, y_at, step, block, x_at, x_step, taps, tap_at, by_row, by_tap, some, streamed)
                    t += 1
                first += wide
        if streamed:
            fence()  # type: ignore[call-arg]


@compiled
def _multiply_rows(out, grad, x, heads, count, before):  # type: ignore[no-untyped-def]
    """out[((b length + t) heads + h) count + k] += sum_c grad[b, t, c] x[b, t - before + k, c]."""
    batch, length, channels = grad.shape
    rows, width, step, flat = x.shape[1], channels // heads, unsigned(channels), x.reshape(x.size)
    segments = (length + SEGMENT - 1) // SEGMENT
    for task in prange(batch * segments):
        b, start = task // segments, task % segments * SEGMENT
        last = min(start + SEGMENT, length)
        block = np.empty((SEGMENT + count) * 64, x.dtype)
        for h in range(heads):
            first = h * width
            while first < (h + 1) * width:
                left = (h + 1) * width - first
                wide = 64 if left >= 64 else _block_width(left)
                at = unsigned(b * rows * channels + first)
                _copy_window(block, flat, at, step, rows, start - before, last - start + count - 1, wide)
                x_step = unsigned(wide)
                for t in range(start, last):
                    k = max(0, before - t)
                    met = unsigned(max(0, min(count, rows + before - t) - k))
                    eights = met // EIGHT if wide > 1 else unsigned(0)
                    done = eights * EIGHT
                    out_at = unsigned(((b * length + t) * heads + h) * count + k)
                    x_at = unsigned((t - start + k) * wide)
                    grad_at = unsigned((b * length + t) * channels + first)
                    rest_at, rest = x_at + done * x_step, met - done
                    if wide == 64:
                        _dots_64_by_8(out, out_at, grad, grad_at, block, x_at, x_step, eights)
                        _dots_64(out, out_at + done, grad, grad_at, block, rest_at, x_step, rest)
                    elif wide == 32:
                        _dots_32_by_8(out, out_at, grad, grad_at, block, x_at, x_step, eights)
                        _dots_32(out, out_at + done, grad, grad_at, block, rest_at, x_step, rest)
                    elif wide == 16:
                        _dots_16_by_8(out, out_at, grad, grad_at, block, x_at, x_step, eights)
                        _dots_16(out, out_at + done, grad, grad_at, block, rest_at, x_step, rest)
                    elif wide == 8:
                        _dots_8_by_8(out, out_at, grad, grad_at, block, x_at, x_step, eights)
                        _dots_8(out, out_at + done, grad, grad_at, block, rest_at, x_step, rest)
                    else:
                        _dots_1(out, out_at, grad, grad_at, block, x_at, x_step, rest)
                first += wide


@compiled
def _correlate_rows(out, grad, x, heads, count, before):  # type: ignore[no-untyped-def]
    """out[task, h, k] = sum_t sum_c grad[b, t, c] x[b, t - before + k, c] over the rows t of a task's segment."""
    batch, length, channels = grad.shape
    width, step, flat = channels // heads, unsigned(channels), x.reshape(x.size)
    segments = (length + SEGMENT - 1) // SEGMENT
    eights = (count + 7) // 8
    for task in prange(batch * segments):
        b, start = task // segments, task % segments * SEGMENT
        last = min(start + SEGMENT, length)
        met = unsigned(last - start)
        block, sums = np.empty((SEGMENT + 8 * eights) * 32, x.dtype), np.empty(8, x.dtype)
        for h in range(heads):
            first = h * width
            while first < (h + 1) * width:
                wide = _block_width((h + 1) * width - first)
                at, wanted = unsigned(b * x.shape[1] * channels + first), last - start + 8 * eights - 1
                _copy_window(block, flat, at, step, x.shape[1], start - before, wanted, wide)
                grad_at, x_step = unsigned((b * length + start) * channels + first), unsigned(wide)
                for eight in range(eights):
                    x_at = unsigned(8 * eight * wide)
                    if wide == 32:
                        _correlate_32(sums, unsigned(0), grad, grad_at, step, block, x_at, x_step, met)
                    elif wide == 16:
                        _correlate_16(sums, unsigned(0), grad, grad_at, step, block, x_at, x_step, met)
                    elif wide == 8:
                        _correlate_8(sums, unsigned(0), grad, grad_at, step, block, x_at, x_step, met)
                    else:
                        for k in range(8):
                            _correlate_1(sums, unsigned(k), grad, grad_at, step, block, x_at + unsigned(k), x_step, met)
                    for k in range(8 * eight, min(8 * eight + 8, count)):
                        out[task, h, k] += sums[k - 8 * eight]
                first += wide


# ---------------------------------------------------------------------- softmax over short rows

SOFTMAX_ROWS = 128
"""Rows of one task of a thread: their entries stay in the fastest cache between the three passes."""
_exp_64, _exp_8, _exp_1 = (exponentials(width) for width in (64, 8, 1))


@compiled
def _softmax_rows(out, logits, count):  # type: ignore[no-untyped-def]
    """out[r, k] = exp(logits[r, k]) / sum_j exp(logits[r, j]) of flat arrays with `count` entries a row."""
    rows, n = logits.size // count, unsigned(count)
    for task in prange((rows + SOFTMAX_ROWS - 1) // SOFTMAX_ROWS):
        start, end = unsigned(task * SOFTMAX_ROWS * count), unsigned(min((task + 1) * SOFTMAX_ROWS, rows) * count)
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
    for task in prange((rows + SOFTMAX_ROWS - 1) // SOFTMAX_ROWS):
        start, end = unsigned(task * SOFTMAX_ROWS * count), unsigned(min((task + 1) * SOFTMAX_ROWS, rows) * count)
        for row in range(start, end, n):
            mean = taps[row] * grad[row]
            for i in range(row + ONE, row + n):
                mean += taps[i] * grad[i]
            for i in range(row, row + n):
                grad[i] = taps[i] * (grad[i] - mean)


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
        run(_multiply_rows, view(own).ravel(), view(grad), view(x), heads, count, before)
        return own
    segments = grad.shape[0] * -(-grad.shape[1] // SEGMENT)
    parts = torch.zeros(segments, heads, count, dtype=x.dtype)
    run(_correlate_rows, view(parts), view(grad), view(x), heads, count, before)
    return parts.sum(0, dtype=torch.float64).to(x.dtype)


def _weighted_rows(x: Tensor, taps: Tensor, before: int, length: int, tap_address: tuple[int, int, int, int]) -> Tensor:
    dtype, (batch, _, channels), (heads, count) = x.dtype, x.shape, taps.shape[-2:]
    x, taps = plain(x), plain(taps)
    y = torch.empty(batch, length, channels, dtype=x.dtype)
    aligned = y.data_ptr() % ALIGNMENT == 0 and channels // heads * y.element_size() % ALIGNMENT == 0
    streamed = aligned and y.nbytes > STREAMED_BYTES
    given = view(y), view(x), view(taps).ravel(), heads, count, before, *tap_address, streamed
    if count >= PAIRED or channels // heads < 32:
        _, tap_row, _, tap_step = tap_address
        run(_weigh_blocks, *given, tap_row == 0 or tap_step == 1)
    else:
        run(_weigh_rows, *given)
    return y.to(dtype)


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
