"""The tap convolution and its gradients as Triton kernels.

    y[b, t, c] = sum_k taps[(b, t,) head(c), k] * x[b, t - before + k, c]        head(c) = c // (C / H), zeros outside x

A program computes one tile, a stretch of time by channels of one head: channels lie side by side in memory, and a tile
needs one set of taps for each position. Sums run in float32, or float64 for float64 inputs. Every number is written by
one program and partial sums are added in a fixed order, so equal inputs give equal bits.

Where taps are the softmax of logits, programs read the logits: a tap is exp(logit - log_scale), where log_scale is the
logarithm of the sum of a position's exponentials. The taps themselves would be read and written more often than all
else that the convolution needs.

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
MOST_FUSED_TAPS = 64  # those of all positions of a tile are in registers at once


def forward(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:
    """y for t = 0 .. length - 1. x: (B, S, C); taps: (H, K) or (B, length, H, K). Returns (B, length, C) like x."""
    return _convolved(x, _in_precision_of(x, taps), before, length, transposed=False)


def input_gradient(grad: Tensor, taps: Tensor, before: int, size: int) -> Tensor:
    """Gradient of an x of `size` positions, given that of y: (B, length, C) -> (B, size, C)."""
    return _convolved(grad, _in_precision_of(grad, taps), before, size, transposed=True)


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
                grad.contiguous(), x.contiguous(), None, None, sums, *sizes, SUM=_sum_type(x), COUNT=count, OWN=own,
                SOFTMAX=False, TAPS=1, TIME=time, CHANNELS=width,
            )  # fmt: skip
    return sums if own else sums.sum((0, 1))


def softmax_gradient_(grad: Tensor, taps: Tensor) -> Tensor:
    """From the gradient of taps = softmax(logits) to that of the logits, in one kernel of torch; `grad` is used up."""
    return torch._softmax_backward_data(grad, taps, -1, taps.dtype)


def softmax_forward(x: Tensor, logits: Tensor, before: int, length: int) -> Tensor:
    """y with taps = softmax(logits). logits: (B, length, H, K), K <= MOST_FUSED_TAPS."""
    return _convolved(x, logits, before, length, transposed=False, softmax=True)


def softmax_gradients(grad: Tensor, x: Tensor, logits: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the logits, given that of y, each in its own precision."""
    (batch, length, channels), size = grad.shape, x.shape[1]
    heads, count = logits.shape[-2:]
    logits = logits.contiguous()
    time, width = _tile(length, channels // heads, count)
    out = torch.empty_like(logits)
    precision = torch.promote_types(x.dtype, torch.float32)
    log_scale = torch.empty(batch, length, heads, dtype=precision, device=x.device)
    if out.numel():
        sizes = size, length, before, channels, heads, channels // heads
        with torch.cuda.device_of(x):
            _tap_products[(batch * triton.cdiv(length, time), heads)](
                grad.contiguous(), x.contiguous(), logits, log_scale, out, *sizes, SUM=_sum_type(x), COUNT=count,
                OWN=True, SOFTMAX=True, TAPS=triton.next_power_of_2(count), TIME=time, CHANNELS=width,
            )  # fmt: skip
    return _convolved(grad, logits, before, size, transposed=True, softmax=True, log_scale=log_scale), out


def _convolved(
    source: Tensor,
    taps: Tensor,
    before: int,
    length: int,
    transposed: bool,
    softmax: bool = False,
    log_scale: Tensor | None = None,
) -> Tensor:
    batch, size, channels = source.shape
    heads, count = taps.shape[-2:]
    time, width = _tile(length, channels // heads, count if softmax else 1)
    out = torch.empty(batch, length, channels, dtype=source.dtype, device=source.device)
    if out.numel():
        grid = batch * triton.cdiv(length, time), heads * triton.cdiv(channels // heads, width)
        sizes = size, length, before, channels, heads, channels // heads
        flags = {"COUNT": count, "OWN": taps.dim() == 4, "TRANSPOSED": transposed, "TIME": time, "CHANNELS": width}
        flags |= {"SUM": _sum_type(source), "SOFTMAX": softmax, "TAPS": triton.next_power_of_2(count)}
        with torch.cuda.device_of(source):
            _convolve[grid](source.contiguous(), taps.contiguous(), log_scale, out, *sizes, **flags)
    return out


def _in_precision_of(x: Tensor, taps: Tensor) -> Tensor:
    """Taps in the precision in which sums run."""
    return taps.to(torch.promote_types(x.dtype, torch.float32))


def _sum_type(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _tile(length: int, head_width: int, count: int = 1) -> tuple[int, int]:
    """Positions and channels of a tile: powers of two, no more than there is to do.

    count: the taps of every position that are in registers as well.
    """
    width = min(MOST_CHANNELS, triton.next_power_of_2(head_width))
    most = TILE // max(width, triton.next_power_of_2(count))
    return min(MOST_TIME, most, triton.next_power_of_2(max(length, 1))), width


@triton.jit
def _logits(
    logits: tl.tensor, position: tl.tensor, exists: tl.tensor, SUM: tl.constexpr, COUNT: tl.constexpr,
    TAPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Logits (positions, TAPS), -inf beyond the last tap, and the log_scale of each position; finite where none is."""
    column = tl.arange(0, TAPS)[None, :]
    mask = exists[:, None] & (column < COUNT)
    values = tl.load(logits + position[:, None] * COUNT + column, mask=mask, other=0.0).to(SUM)
    values = tl.where(column < COUNT, values, float("-inf"))
    largest = tl.max(values, 1)
    return values, largest + tl.log(tl.sum(tl.exp(values - largest[:, None]), 1))


# Lengths change from call to call: compiling anew for those divisible by 16 would not pay.
@triton.jit(do_not_specialize=["size", "length", "before"])
def _convolve(
    source: tl.tensor,
    taps: tl.tensor,
    log_scale: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    length: tl.tensor,
    before: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    head_width: tl.tensor,
    SUM: tl.constexpr,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    TAPS: tl.constexpr,
    TIME: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """out[b, t, c] = sum_k taps[.., k] source[b, t - before + k, c]; TRANSPOSED: source[b, t + before - k, c].

    source: (B, size, C); out: (B, length, C). Own taps belong to the positions of y: those of out, or, TRANSPOSED, of
    source. SOFTMAX: taps are the softmax of what is given, whose log_scale (B, size, H) is known if
    TRANSPOSED. Offsets are 64 bits wide, as a batch may hold more than 2^31 numbers.
    """
    blocks = tl.cdiv(length, TIME)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    time = (tl.program_id(0) % blocks * TIME + tl.arange(0, TIME)).to(tl.int64)
    pieces = tl.cdiv(head_width, CHANNELS)
    head = tl.program_id(1) // pieces
    within = tl.program_id(1) % pieces * CHANNELS + tl.arange(0, CHANNELS)
    channel = (head * head_width + within)[None, :]
    in_head = (within < head_width)[None, :]
    total = tl.zeros((TIME, CHANNELS), dtype=SUM)
    if SOFTMAX and not TRANSPOSED:
        _, scale = _logits(taps, (row * length + time) * heads + head, time < length, SUM, COUNT, TAPS)
    for k in range(COUNT):
        read = time + (before - k) if TRANSPOSED else time + (k - before)
        readable = (read >= 0) & (read < size)
        values = tl.load(
            source + (row * size + read)[:, None] * channels + channel, mask=readable[:, None] & in_head, other=0.0
        )
        if OWN:
            position = row * size + read if TRANSPOSED else row * length + time
            exists = readable if TRANSPOSED else time < length
            weight = tl.load(taps + (position * heads + head) * COUNT + k, mask=exists, other=0.0).to(SUM)
            if SOFTMAX:
                if TRANSPOSED:
                    scale = tl.load(log_scale + position * heads + head, mask=exists, other=0.0)
                weight = tl.exp(weight - scale)
            weight = weight[:, None]
        else:
            weight = tl.load(taps + head * COUNT + k)
        total += weight * values.to(SUM)
    written = (time < length)[:, None] & in_head
    tl.store(out + (row * length + time)[:, None] * channels + channel, total.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["size", "length", "before"])
def _tap_products(
    grad: tl.tensor,
    source: tl.tensor,
    logits: tl.tensor,
    log_scale: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    length: tl.tensor,
    before: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    head_width: tl.tensor,
    SUM: tl.constexpr,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    SOFTMAX: tl.constexpr,
    TAPS: tl.constexpr,
    TIME: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """out[b, t, h, k] = sum_{c in h} grad[b, t, c] source[b, t - before + k, c] for OWN taps.

    For shared ones t runs over blocks of TIME positions, and the sum over the positions of a block as well.
    grad: (B, length, C); source: (B, size, C). SOFTMAX: out is the gradient of the logits (B, length, H, COUNT) of OWN
    taps, out_k = p_k (g_k - sum_j p_j g_j) with p their softmax and g the sums above; their log_scale (B, length, H) is
    written as well.
    """
    blocks = tl.cdiv(length, TIME)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    time = (block * TIME + tl.arange(0, TIME)).to(tl.int64)
    head = tl.program_id(1)
    position = (row * length + time) * heads + head
    column = tl.arange(0, TAPS)[None, :]
    gradients = tl.zeros((TIME, TAPS), dtype=SUM)
    for k in range(COUNT):
        read = time + (k - before)
        readable = ((time < length) & (read >= 0) & (read < size))[:, None]
        products = tl.zeros((TIME, CHANNELS), dtype=SUM)
        for start in range(0, head_width, CHANNELS):
            within = start + tl.arange(0, CHANNELS)
            channel = (head * head_width + within)[None, :]
            mask = readable & (within < head_width)[None, :]
            left = tl.load(grad + (row * length + time)[:, None] * channels + channel, mask=mask, other=0.0)
            right = tl.load(source + (row * size + read)[:, None] * channels + channel, mask=mask, other=0.0)
            products += left.to(SUM) * right.to(SUM)
        sums = tl.sum(products, 1)
        if SOFTMAX:
            gradients = tl.where(column == k, sums[:, None], gradients)
        elif OWN:
            tl.store(out + position * COUNT + k, sums, mask=time < length)
        else:
            tl.store(out + ((row * blocks + block) * heads + head) * COUNT + k, tl.sum(sums, 0))
    if SOFTMAX:
        values, scale = _logits(logits, position, time < length, SUM, COUNT, TAPS)
        weights = tl.exp(values - scale[:, None])
        gradients = weights * (gradients - tl.sum(weights * gradients, 1)[:, None])
        written = (time < length)[:, None] & (column < COUNT)
        tl.store(out + position[:, None] * COUNT + column, gradients.to(out.dtype.element_ty), mask=written)
        tl.store(log_scale + position, scale, mask=time < length)
