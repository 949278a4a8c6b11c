"""The tap convolution and its gradients as Triton kernels.

    y[b, t, c] = sum_k taps[(b, t,) head(c), k] * x[b, t - before + k, c]        head(c) = c // (C / H), zeros outside x

A program computes one tile, a stretch of time by channels of one head: channels lie side by side in memory, and a tile
needs one set of taps for each position. Sums run in float32, or float64 for float64 inputs. Every number is written by
one program and partial sums are added in a fixed order, so equal inputs give equal bits.

With TRITON_INTERPRET=1 in the environment before triton is imported, the same kernels run on CPU tensors.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# torch's own softmax is a fused kernel on a GPU
from subquad.kernels.conv.reference import softmax as softmax

TILE = 2048  # numbers in a tile: 16 for each of the 128 threads of a program
MOST_CHANNELS = 64
MOST_TIME = 256


def forward(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:
    """y for t = 0 .. length - 1. x: (B, S, C); taps: (H, K) or (B, length, H, K). Returns (B, length, C) like x."""
    return _convolved(x, taps, before, length, transposed=False)


def input_gradient(grad: Tensor, taps: Tensor, before: int, size: int) -> Tensor:
    """Gradient of an x of `size` positions, given that of y: (B, length, C) -> (B, size, C)."""
    return _convolved(grad, taps, before, size, transposed=True)


def tap_gradient(grad: Tensor, x: Tensor, before: int, taps_shape: Sequence[int]) -> Tensor:
    """Gradient of taps, given that of y (B, length, C) and x (B, S, C): taps_shape, float32 or float64."""
    (batch, length, channels), size = grad.shape, x.shape[1]
    heads, count = taps_shape[-2:]
    own = len(taps_shape) == 4
    time, width = _tile(length, channels // heads)
    blocks = triton.cdiv(length, time)
    precision = torch.promote_types(x.dtype, torch.float32)
    sums = torch.empty(batch, length if own else blocks, heads, count, dtype=precision, device=x.device)
    if sums.numel():
        grid = batch * blocks, heads
        sizes = size, length, before, channels, heads, channels // heads
        with torch.cuda.device_of(x):
            _tap_products[grid](
                grad.contiguous(), x.contiguous(), sums, *sizes, COUNT=count, OWN=own, TIME=time, CHANNELS=width
            )
    return sums if own else sums.sum((0, 1))


def softmax_gradient_(grad: Tensor, taps: Tensor) -> Tensor:
    """From the gradient of taps = softmax(logits) to that of the logits, in one kernel of torch; `grad` is used up."""
    return torch._softmax_backward_data(grad, taps, -1, taps.dtype)


def _convolved(source: Tensor, taps: Tensor, before: int, length: int, transposed: bool) -> Tensor:
    batch, size, channels = source.shape
    heads, count = taps.shape[-2:]
    taps = taps.to(torch.promote_types(source.dtype, torch.float32)).contiguous()
    time, width = _tile(length, channels // heads)
    out = torch.empty(batch, length, channels, dtype=source.dtype, device=source.device)
    if out.numel():
        grid = batch * triton.cdiv(length, time), heads * triton.cdiv(channels // heads, width)
        sizes = size, length, before, channels, heads, channels // heads
        flags = {"COUNT": count, "OWN": taps.dim() == 4, "TRANSPOSED": transposed, "TIME": time, "CHANNELS": width}
        with torch.cuda.device_of(source):
            _convolve[grid](source.contiguous(), taps, out, *sizes, **flags)
    return out


def _tile(length: int, head_width: int) -> tuple[int, int]:
    """Positions and channels of a tile: powers of two, no more than there is to do."""
    width = min(MOST_CHANNELS, triton.next_power_of_2(head_width))
    return min(MOST_TIME, TILE // width, triton.next_power_of_2(max(length, 1))), width


# Lengths change from call to call: compiling anew for those divisible by 16 would not pay.
@triton.jit(do_not_specialize=["size", "length", "before"])
def _convolve(
    source: tl.tensor,
    taps: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    length: tl.tensor,
    before: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    head_width: tl.tensor,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TIME: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """out[b, t, c] = sum_k taps[.., k] source[b, t - before + k, c]; TRANSPOSED: source[b, t + before - k, c].

    source: (B, size, C); out: (B, length, C). Own taps belong to the positions of y: those of out, or, TRANSPOSED, of
    source. Offsets are 64 bits wide, as a batch may hold more than 2^31 numbers.
    """
    blocks = tl.cdiv(length, TIME)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    time = (tl.program_id(0) % blocks * TIME + tl.arange(0, TIME)).to(tl.int64)
    pieces = tl.cdiv(head_width, CHANNELS)
    head = tl.program_id(1) // pieces
    within = tl.program_id(1) % pieces * CHANNELS + tl.arange(0, CHANNELS)
    channel = (head * head_width + within)[None, :]
    in_head = (within < head_width)[None, :]
    total = tl.zeros((TIME, CHANNELS), dtype=taps.dtype.element_ty)
    for k in range(COUNT):
        read = time + (before - k) if TRANSPOSED else time + (k - before)
        readable = (read >= 0) & (read < size)
        values = tl.load(
            source + (row * size + read)[:, None] * channels + channel, mask=readable[:, None] & in_head, other=0.0
        )
        if OWN:
            position = row * size + read if TRANSPOSED else row * length + time
            exists = readable if TRANSPOSED else time < length
            weight = tl.load(taps + (position * heads + head) * COUNT + k, mask=exists, other=0.0)[:, None]
        else:
            weight = tl.load(taps + head * COUNT + k)
        total += weight * values.to(taps.dtype.element_ty)
    written = (time < length)[:, None] & in_head
    tl.store(out + (row * length + time)[:, None] * channels + channel, total.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["size", "length", "before"])
def _tap_products(
    grad: tl.tensor,
    source: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    length: tl.tensor,
    before: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    head_width: tl.tensor,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    TIME: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """out[b, t, h, k] = sum_{c in h} grad[b, t, c] source[b, t - before + k, c] for OWN taps.

    For shared ones t runs over blocks of TIME positions, and the sum over the positions of a block as well.
    grad: (B, length, C); source: (B, size, C).
    """
    blocks = tl.cdiv(length, TIME)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    time = (block * TIME + tl.arange(0, TIME)).to(tl.int64)
    head = tl.program_id(1)
    for k in range(COUNT):
        read = time + (k - before)
        readable = ((time < length) & (read >= 0) & (read < size))[:, None]
        products = tl.zeros((TIME, CHANNELS), dtype=out.dtype.element_ty)
        for start in range(0, head_width, CHANNELS):
            within = start + tl.arange(0, CHANNELS)
            channel = (head * head_width + within)[None, :]
            mask = readable & (within < head_width)[None, :]
            left = tl.load(grad + (row * length + time)[:, None] * channels + channel, mask=mask, other=0.0)
            right = tl.load(source + (row * size + read)[:, None] * channels + channel, mask=mask, other=0.0)
            products += left.to(out.dtype.element_ty) * right.to(out.dtype.element_ty)
        sums = tl.sum(products, 1)
        if OWN:
            tl.store(out + ((row * length + time) * heads + head) * COUNT + k, sums, mask=time < length)
        else:
            tl.store(out + ((row * blocks + block) * heads + head) * COUNT + k, tl.sum(sums, 0))
