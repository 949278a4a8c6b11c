"""Sums over the past, or over the future, carried from chunk to chunk of a sequence, as a Triton kernel.

With own sums B_n of every chunk n, relative to exp(m_n), and what there was before, S_0 relative to exp(r_0):

    r_{n+1} = max(r_n, m_n)        S_{n+1} = exp(r_n - r_{n+1}) S_n + exp(m_n - r_{n+1}) B_n

The gradients run the other way, relative to exp(-r): from what comes after the last chunk, G_N, and every chunk's A_n,

    G_n = exp(r_n - r_{n+1}) G_{n+1} + A_n

Every exponent is at most 0. Chunks are taken in groups, whose sums are one product with a triangular matrix of scales,
so that the loop is short and its loads do not wait for one another. Each number is written by one program.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.masking import MASK_VALUE

GROUP = 16  # chunks: the smallest side that tl.dot takes
TILE = 128  # entries of a program

_LEAST = tl.constexpr(MASK_VALUE)


class Carry(NamedTuple):
    """states: (pairs, chunks, entries), what each chunk gets; last: (pairs, entries), what is left after all."""

    states: Tensor
    last: Tensor


def carry_past(
    sums: Tensor,
    own: Tensor,
    first: Tensor | None = None,
    first_log_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: int | None = None,
) -> tuple[Carry, Tensor]:
    """S_n and S_N, and r (pairs, chunks + 1).

    sums: B (pairs, chunks, entries) in float32; own: m (pairs, chunks); first: S_0 (pairs, entries), None for zeros;
    first_log_scale: r_0 (pairs,), None for the least there is. dtype: that of the states; S_N is in float32.
    scaled: how many of the entries are relative to the scales; the rest are plain sums. None: all.
    """
    pairs, chunks, _ = sums.shape
    reached = sums.new_empty(pairs, chunks + 1)
    return _carry(sums, own, reached, first, first_log_scale, dtype, scaled, future=False), reached


def carry_future(
    sums: Tensor,
    reached: Tensor,
    first: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: int | None = None,
) -> Carry:
    """G_{n+1} for every chunk n, and G_0. sums: A (pairs, chunks, entries); reached: r; first: G_N."""
    return _carry(sums, reached, reached, first, None, dtype, scaled, future=True)


def _carry(
    sums: Tensor,
    own: Tensor,
    reached: Tensor,
    first: Tensor | None,
    first_log_scale: Tensor | None,
    dtype: torch.dtype,
    scaled: int | None,
    future: bool,
) -> Carry:
    pairs, chunks, entries = sums.shape
    first, first_log_scale = (None if t is None else t.contiguous() for t in (first, first_log_scale))
    found = Carry(torch.empty_like(sums, dtype=dtype), sums.new_empty(pairs, entries))
    if sums.numel():
        with torch.cuda.device_of(sums):
            _carry_kernel[pairs, triton.cdiv(entries, TILE)](
                sums, own, reached, first, first_log_scale, *found, chunks, entries,
                entries if scaled is None else scaled, FUTURE=future, MIXED=scaled is not None,
                GROUP=GROUP, TILE=TILE, num_stages=1,
            )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["chunks"])
def _carry_kernel(
    sums: tl.tensor,
    own: tl.tensor,
    reached: tl.tensor,
    first: tl.tensor | None,
    first_log_scale: tl.tensor | None,
    states: tl.tensor,
    last: tl.tensor,
    chunks: tl.tensor,
    entries: tl.tensor,
    scaled: tl.tensor,
    FUTURE: tl.constexpr,
    MIXED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One pair and TILE entries. Programs of all entries compute r; the first of them writes it."""
    pair = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = entry < entries
    reached += pair * (chunks + 1)
    own += pair * (chunks + 1 if FUTURE else chunks)
    sums += pair * chunks * entries
    states += pair * chunks * entries
    state = tl.zeros((TILE,), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + pair * entries + entry, mask=inside, other=0.0).to(tl.float32)
    if FUTURE:
        scale = tl.load(reached + chunks)
    elif first_log_scale is not None:
        scale = tl.load(first_log_scale + pair).to(tl.float32)
    else:
        scale = _LEAST
    writes = (not FUTURE) and tl.program_id(1) == 0
    tl.store(reached, scale, mask=writes)
    edge = chunks.to(tl.int64) - 1 if FUTURE else chunks.to(tl.int64) * 0
    tl.store(states + edge * entries + entry, state.to(states.dtype.element_ty), mask=inside)
    row = tl.arange(0, GROUP)
    for begin in range(0, chunks, GROUP):
        exists = begin + row < chunks
        n = (chunks - 1 - begin - row if FUTURE else begin + row).to(tl.int64)
        block = tl.load(sums + n[:, None] * entries + entry[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        if FUTURE:
            own_scales = tl.load(own + tl.maximum(n, 0))
            scales = own_scales
            weights = tl.exp(scales[:, None] - own_scales[None, :])
            decay = tl.exp(scales - scale)
            scale = tl.min(scales, 0)
        else:
            own_scales = tl.load(own + n, mask=exists, other=_LEAST)
            so_far = tl.where(row[:, None] >= row[None, :], own_scales[None, :], _LEAST)
            scales = tl.maximum(tl.max(so_far, 1), scale)
            weights = tl.exp(own_scales[None, :] - scales[:, None])
            decay = tl.exp(scale - scales)
            scale = tl.max(scales, 0)
            tl.store(reached + n + 1, scales, mask=exists & writes)
        past = row[:, None] >= row[None, :]
        totals = tl.dot(tl.where(past, weights, 0.0), block, input_precision="ieee") + decay[:, None] * state[None, :]
        if MIXED:
            plain = tl.dot(tl.where(past, 1.0, 0.0), block, input_precision="ieee") + state[None, :]
            totals = tl.where((entry < scaled)[None, :], totals, plain)
        target = n - 1 if FUTURE else n + 1
        kept = (exists & (target >= 0) & (target < chunks))[:, None] & inside[None, :]
        place = target[:, None] * entries + entry[None, :]
        tl.store(states + place, totals.to(states.dtype.element_ty), mask=kept)
        state = tl.sum(tl.where((row == GROUP - 1)[:, None], totals, 0.0), 0)
    tl.store(last + pair * entries + entry, state, mask=inside)
