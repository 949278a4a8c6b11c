"""Triton kernels of the scores of primal attention: see `gpu.py`, which launches them.

The second axis of a grid counts the queries of all heads and then their keys: `side`. Beyond the end tokens are 0.
"""

import triton
import triton.language as tl

from subquad.kernels.triton_tools import dot


@triton.jit
def _tokens(
    qk: tl.tensor,
    begin: tl.tensor,
    time: tl.tensor,
    width: tl.tensor,
    by_time: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """x of a chunk: (CHUNK, WIDTH) in float32."""
    index, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    mask = (index < time - begin)[:, None] & (channel < width)[None, :]
    place = index[:, None] * by_time + channel[None, :]
    return tl.load(qk + begin * by_time + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _directions(
    qk: tl.tensor,
    starts: tl.tensor | None,
    chunk: tl.tensor,
    begin: tl.tensor,
    time: tl.tensor,
    width: tl.tensor,
    by_time: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    SMALLEST_SQUARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """u / |u| (CHUNK, WIDTH), 1 / |u| and whether |u| was not clamped. starts: u before every chunk, if causal."""
    u = _tokens(qk, begin, time, width, by_time, CHUNK, WIDTH)
    if starts is not None:
        channel = tl.arange(0, WIDTH)
        u = tl.cumsum(u, 0) + tl.load(starts + chunk * width + channel, mask=channel < width, other=0.0)[None, :]
    square = tl.sum(u * u, 1)
    inverse = tl.rsqrt(tl.maximum(square, SMALLEST_SQUARE))
    return u * inverse[:, None], inverse, square >= SMALLEST_SQUARE


@triton.jit
def _weights(
    weights: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    FACTOR: tl.constexpr,
) -> tl.tensor:
    """W of a head: (WIDTH, RANK)."""
    channel, vector = tl.arange(0, WIDTH), tl.arange(0, RANK)
    mask = (channel < width)[:, None] & (vector < rank)[None, :]
    return tl.load(weights + channel[:, None] * rank + vector[None, :], mask=mask, other=0.0).to(FACTOR)


@triton.jit(do_not_specialize=["time"])
def sum_chunks(
    qk: tl.tensor,
    sums: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    width: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The sum of the tokens of every chunk."""
    chunks = tl.cdiv(time, CHUNK)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, n = row // chunks, row % chunks
    qk += batch * by_batch + (side // heads) * by_part + (side % heads) * by_head
    channel = tl.arange(0, WIDTH)
    total = tl.sum(_tokens(qk, n * CHUNK, time, width, by_time, CHUNK, WIDTH), 0)
    tl.store(sums + ((batch * 2 * heads + side) * chunks + n) * width + channel, total, mask=channel < width)


@triton.jit(do_not_specialize=["time"])
def project(
    qk: tl.tensor,
    weights: tl.tensor,
    starts: tl.tensor | None,
    lengths: tl.tensor | None,
    scores: tl.tensor,
    squares: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    weights_batch: tl.tensor,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SMALLEST_SQUARE: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Scores of BLOCKS chunks, and the sums of their squares over tokens: (batch, segments, 2 heads, s)."""
    segments = tl.cdiv(time, BLOCKS * CHUNK)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, n = row // segments, row % segments
    pair = batch * 2 * heads + side
    part, head = side // heads, side % heads
    qk += batch * by_batch + part * by_part + head * by_head
    length = time if lengths is None else tl.load(lengths + batch)
    if starts is not None:
        starts += pair * segments * width
    w = _weights(weights + batch * weights_batch + side * width * rank, width, rank, WIDTH, RANK, FACTOR)
    index, vector = tl.arange(0, CHUNK), tl.arange(0, RANK)
    total = tl.zeros((RANK,), dtype=tl.float32)
    for block in range(BLOCKS):
        chunk = n * BLOCKS + block
        begin = chunk * CHUNK
        u, _, _ = _directions(qk, starts, chunk, begin, time, width, by_time, CHUNK, WIDTH, SMALLEST_SQUARE)
        s = dot(u.to(FACTOR), w, PRECISION)
        total += tl.sum(tl.where((index < length - begin)[:, None], s * s, 0.0), 0)
        base = scores + (((batch * time + begin) * heads + head) * 2 + part) * rank
        mask = (index < time - begin)[:, None] & (vector < rank)[None, :]
        place = index[:, None] * (2 * heads * rank) + vector[None, :]
        tl.store(base + place, s.to(scores.dtype.element_ty), mask=mask)
    tl.store(squares + (row * 2 * heads + side) * rank + vector, total, mask=vector < rank)


@triton.jit(do_not_specialize=["time"])
def score_gradients(
    qk: tl.tensor,
    weights: tl.tensor,
    starts: tl.tensor | None,
    lengths: tl.tensor | None,
    grad: tl.tensor,
    grad_squares: tl.tensor,
    ends: tl.tensor | None,
    d_qk: tl.tensor | None,
    sums: tl.tensor | None,
    d_weights: tl.tensor | None,
    heads: tl.tensor,
    time: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    weights_batch: tl.tensor,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SMALLEST_SQUARE: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Gradients of the tokens of BLOCKS chunks (d_qk) and what they add to that of W (d_weights).

    Causal, with one chunk: first the sums of the gradients of u (sums), then, given these of all later chunks (ends),
    the gradient of x, the sum of that of u from there on.
    """
    segments = tl.cdiv(time, BLOCKS * CHUNK)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, n = row // segments, row % segments
    pair = batch * 2 * heads + side
    part, head = side // heads, side % heads
    qk += batch * by_batch + part * by_part + head * by_head
    length = time if lengths is None else tl.load(lengths + batch)
    if starts is not None:
        starts += pair * segments * width
    w = _weights(weights + batch * weights_batch + side * width * rank, width, rank, WIDTH, RANK, FACTOR)
    index, vector, channel = tl.arange(0, CHUNK), tl.arange(0, RANK), tl.arange(0, WIDTH)
    slope = tl.load(grad_squares + (batch * heads + head) * rank + vector, mask=vector < rank, other=0.0)
    slope = slope.to(tl.float32) * 2.0 / length
    d_w = tl.zeros((WIDTH, RANK), dtype=tl.float32)
    for block in range(BLOCKS):
        chunk = n * BLOCKS + block
        begin = chunk * CHUNK
        u, inverse, unclamped = _directions(
            qk, starts, chunk, begin, time, width, by_time, CHUNK, WIDTH, SMALLEST_SQUARE
        )
        s = dot(u.to(FACTOR), w, PRECISION)
        exists = (index < time - begin)[:, None]
        base = grad + (((batch * time + begin) * heads + head) * 2 + part) * rank
        place = index[:, None] * (2 * heads * rank) + vector[None, :]
        d_s = tl.load(base + place, mask=exists & (vector < rank)[None, :], other=0.0).to(tl.float32)
        d_s += tl.where((index < length - begin)[:, None], s * slope[None, :], 0.0)
        if d_weights is not None:
            d_w += dot(tl.trans(u.to(FACTOR)), d_s.to(FACTOR), PRECISION)
        d_u = dot(d_s.to(FACTOR), tl.trans(w), PRECISION)
        along = tl.where(unclamped, tl.sum(d_s * s, 1), 0.0)
        d_u = (d_u - u * along[:, None]) * inverse[:, None]
        if sums is not None:
            total = tl.sum(tl.where(exists, d_u, 0.0), 0)
            tl.store(sums + (pair * segments + n) * width + channel, total, mask=channel < width)
        if d_qk is not None:
            if ends is not None:
                after = tl.load(ends + (pair * segments + n) * width + channel, mask=channel < width, other=0.0)
                d_u = tl.cumsum(tl.where(exists, d_u, 0.0), 0, reverse=True) + after[None, :]
            base = d_qk + ((batch * time + begin) * 2 * heads + side) * width
            place = index[:, None] * (2 * heads * width) + channel[None, :]
            tl.store(base + place, d_u.to(d_qk.dtype.element_ty), mask=exists & (channel < width)[None, :])
    if d_weights is not None:
        base = d_weights + (row * 2 * heads + side) * width * rank
        mask = (channel < width)[:, None] & (vector < rank)[None, :]
        tl.store(base + channel[:, None] * rank + vector[None, :], d_w, mask=mask)
