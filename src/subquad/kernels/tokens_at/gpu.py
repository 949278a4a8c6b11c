"""Tokens at chosen positions on a GPU: torch looks them up, and one Triton kernel writes the gradient of x.

A program has a tile, some positions by some channels. It reads the gradient of what x became, and adds to it the
gradients of those tokens that were taken from its positions, one after the other: each number is written by one
program, and equal inputs give equal bits, also where a short row has several tokens of the same position. torch's own
gradient of `gather` adds them in whatever order threads come.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.precision import product_dtype
from subquad.kernels.tokens_at import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIME = 16
MOST_CHANNELS = 256
SAMPLES = 512
"""Positions of tokens that a program looks at together."""


def tokens_at(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """x in the precision of products, and its tokens; see the public function."""
    return _TokensAt.apply(x, positions, product_dtype(x))


class _TokensAt(torch.autograd.Function):
    """Passes x on, so that backward gets its gradient together with that of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return x.view_as(x) if x.dtype == dtype else x.to(dtype), reference.tokens_at(x, positions)[1]

    @staticmethod
    def backward(ctx: Any, d_x: Tensor | None, d_tokens: Tensor | None) -> tuple[Tensor | None, None, None]:
        (positions,) = ctx.saved_tensors
        if d_tokens is None:
            return None if d_x is None else d_x.to(ctx.dtype), None, None
        if d_x is None:
            d_x = d_tokens.new_zeros(ctx.shape)
        if tracing.differentiates_backward():
            index = positions[..., None].expand_as(d_tokens)
            return d_x.to(ctx.dtype).scatter_add(1, index, d_tokens), None, None
        return _add_tokens(d_x, d_tokens, positions), None, None


@torch.library.custom_op("subquad::add_tokens", mutates_args=())
def _add_tokens(grad: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """grad (batch, time, C), with tokens (batch, samples, C) added at their positions, in the precision of tokens."""
    out = _fake_add_tokens(grad, tokens, positions)
    (batch, time, channels), samples = grad.shape, tokens.shape[1]
    width = min(MOST_CHANNELS, triton.next_power_of_2(channels))
    if out.numel():
        with torch.cuda.device_of(grad):
            add_tokens[(batch * triton.cdiv(time, TIME), triton.cdiv(channels, width))](
                grad.contiguous(), tokens.contiguous(), positions.contiguous(), out, time, samples, channels,
                TIME=TIME, CHANNELS=width, SAMPLES=SAMPLES,
            )  # fmt: skip
    return out


@_add_tokens.register_fake
def _fake_add_tokens(grad: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG001
    return tokens.new_empty(grad.shape)


@triton.jit(do_not_specialize=["time", "samples"])
def add_tokens(
    grad: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    time: tl.tensor,
    samples: tl.tensor,
    channels: tl.tensor,
    TIME: tl.constexpr,
    CHANNELS: tl.constexpr,
    SAMPLES: tl.constexpr,
) -> None:
    """One tile of out: the gradient, and the tokens first .. end - 1, whose positions are in the tile."""
    blocks = tl.cdiv(time, TIME)
    row, begin = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * TIME
    first, end = 0, 0
    for start in range(0, samples, SAMPLES):
        sample = start + tl.arange(0, SAMPLES)
        position = tl.load(positions + row * samples + sample, mask=sample < samples, other=time + TIME)
        first += tl.sum((position < begin).to(tl.int32), 0)
        end += tl.sum((position < begin + TIME).to(tl.int32), 0)
    place = begin + tl.arange(0, TIME)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    offset = (row * time + place)[:, None] * channels + channel[None, :]
    written = (place < time)[:, None] & (channel < channels)[None, :]
    total = tl.load(grad + offset, mask=written, other=0.0).to(tl.float32)
    for sample in range(first, end):
        position = tl.load(positions + row * samples + sample)
        token = tl.load(tokens + (row * samples + sample) * channels + channel, mask=channel < channels, other=0.0)
        total += tl.where((place == position)[:, None], token.to(tl.float32)[None, :], 0.0)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=written)
