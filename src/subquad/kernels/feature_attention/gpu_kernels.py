"""Triton kernels of linear attention through exponential features: see `gpu.py`, which launches them.

A program works on one chunk of CHUNK positions of a pair of batch and head; p counts pairs, n chunks. Features are
taken FEATURES at a time, and are computed where they are needed: only sums over them are ever in memory. Features of
what is not a key are 0. Divisors are sums of the rounded weights that products take, so that weights add up to 1.
"""

import triton
import triton.language as tl

from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.triton_tools import dot

_LEAST = tl.constexpr(MASK_VALUE)


@triton.jit
def tile_of(
    base: tl.tensor,
    first: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Places (FEATURES, WIDTH) of a tile of sums, and which of them there are."""
    feature, channel = first + tl.arange(0, FEATURES), tl.arange(0, WIDTH)
    inside = (feature < features)[:, None] & (channel < width)[None, :]
    return base + feature[:, None] * width + channel[None, :], inside


@triton.jit
def rows_of(
    matrix: tl.tensor,
    first: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
) -> tl.tensor:
    """W d^(-1/4) from a first feature on: (FEATURES, WIDTH), rounded as autocast rounds the weights of a linear map."""
    place, inside = tile_of(matrix, first, features, width, FEATURES, WIDTH)
    return (tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale).to(FACTOR)


@triton.jit
def scores_of(
    t: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    features: tl.tensor,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """y = W t d^(-1/4) (CHUNK, FEATURES) of tokens t (CHUNK, WIDTH).

    Where there is no feature y is -inf, whose exponential is 0.
    """
    y = dot(t, tl.trans(rows), PRECISION)
    return tl.where((first + tl.arange(0, FEATURES) < features)[None, :], y, float("-inf"))


@triton.jit
def features_of(
    t: tl.tensor,
    matrix: tl.tensor,
    first: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`scores_of` tokens from a first feature on, and the rows of W."""
    rows = rows_of(matrix, first, features, width, scale, FEATURES, WIDTH, t.dtype)
    return scores_of(t, rows, first, features, FEATURES, PRECISION), rows


@triton.jit
def _largest(
    t: tl.tensor,
    matrix: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    CHUNK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The largest y of every token: (CHUNK,)."""
    largest = tl.full((CHUNK,), float("-inf"), dtype=tl.float32)
    for first in range(0, features, FEATURES):
        y, _ = features_of(t, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
        largest = tl.maximum(largest, tl.max(y, 1))
    return largest


@triton.jit
def half_norms(t: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """c = |t|^2 d^(-1/2) / 2: (CHUNK,)."""
    wide = t.to(tl.float32) * scale
    return tl.sum(wide * wide, 1) / 2


@triton.jit
def load_rows(
    base: tl.tensor,
    exists: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """(CHUNK, WIDTH) from rows that lie `stride` apart; 0 where nothing exists."""
    channel = tl.arange(0, WIDTH)
    place = tl.arange(0, CHUNK)[:, None] * stride + channel[None, :]
    return tl.load(base + place, mask=exists[:, None] & (channel < width)[None, :], other=0.0)


@triton.jit
def store_rows(
    base: tl.tensor,
    values: tl.tensor,
    exists: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    channel = tl.arange(0, WIDTH)
    place = tl.arange(0, CHUNK)[:, None] * stride + channel[None, :]
    tl.store(base + place, values.to(base.dtype.element_ty), mask=exists[:, None] & (channel < width)[None, :])


@triton.jit
def keys_of(mask: tl.tensor | None, place: tl.tensor, exists: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Which positions of a chunk are keys; place: of its first in the mask."""
    keys = exists
    if mask is not None:
        keys = tl.load(mask + place + tl.arange(0, CHUNK), mask=exists, other=0) != 0
    return keys


# ---------------------------------------------------------------------- forward


# Lengths change from call to call: compiling anew for those divisible by 16 would not pay.
@triton.jit(do_not_specialize=["time"])
def sum_keys(
    qkv: tl.tensor,
    matrix: tl.tensor,
    mask: tl.tensor | None,
    sums: tl.tensor,
    vectors: tl.tensor,
    own: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    scale: tl.tensor,
    log_root: tl.tensor,
    BLOCKS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Of BLOCKS chunks: sum_j phi_j v_j^T (m, d), and vectors [sum_j phi_j (m) | sum_j v_j (d) | the number of keys].

    phi is relative to exp(own), the largest y of all features of these keys, whose maximum grows from chunk to chunk.
    ONE_TILE: there are no other features than those of this program.
    """
    segments = tl.cdiv(time, BLOCKS * CHUNK)
    segment = tl.program_id(0).to(tl.int64)
    pair, n = segment // segments, segment % segments
    batch, head = pair // heads, pair % heads
    first_feature = tl.program_id(1) * FEATURES
    index, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    feature = first_feature + tl.arange(0, FEATURES)
    matrix += head * features * width
    qkv += batch * by_batch + head * by_head
    total = tl.zeros((FEATURES, WIDTH), dtype=tl.float32)
    counts = tl.zeros((FEATURES,), dtype=tl.float32)
    values = tl.zeros((WIDTH,), dtype=tl.float32)
    number = 0.0
    top = _LEAST
    rows = rows_of(matrix, first_feature, features, width, scale, FEATURES, WIDTH, FACTOR)
    for block in range(BLOCKS):
        begin = (n * BLOCKS + block) * CHUNK
        exists = index < time - begin
        keys = keys_of(mask, batch * time + begin, exists, CHUNK)
        k = load_rows(qkv + by_part + begin * by_time, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
        v = load_rows(qkv + 2 * by_part + begin * by_time, keys, width, by_time, CHUNK, WIDTH)
        y = scores_of(k, rows, first_feature, features, FEATURES, PRECISION)
        if ONE_TILE:
            largest = tl.max(y, 1)
        else:
            largest = _largest(k, matrix, features, width, scale, CHUNK, FEATURES, WIDTH, PRECISION)
        new_top = tl.maximum(top, tl.max(tl.where(keys, largest, _LEAST), 0))
        y -= (half_norms(k, scale) + new_top + log_root)[:, None]
        phi = tl.exp(tl.where(keys[:, None], y, float("-inf"))).to(FACTOR)
        decay = tl.exp(top - new_top)
        total = total * decay + dot(tl.trans(phi), v.to(FACTOR), PRECISION)
        counts = counts * decay + tl.sum(phi.to(tl.float32), 0)
        values += tl.sum(v.to(tl.float32), 0)
        number += tl.sum(keys.to(tl.float32), 0)
        top = new_top
    place, inside = tile_of(sums + segment * features * width, first_feature, features, width, FEATURES, WIDTH)
    tl.store(place, total, mask=inside)
    vectors += segment * (features + width + 1)
    tl.store(vectors + feature, counts, mask=feature < features)
    writes = tl.program_id(1) == 0
    tl.store(vectors + features + channel, values, mask=(channel < width) & writes)
    tl.store(vectors + features + width, number, mask=writes)
    tl.store(own + segment, top, mask=writes)


@triton.jit(do_not_specialize=["time"])
def read_sums(
    qkv: tl.tensor,
    matrix: tl.tensor,
    mask: tl.tensor | None,
    states: tl.tensor,
    vectors: tl.tensor,
    reached: tl.tensor,
    out: tl.tensor,
    statistics: tl.tensor,
    pairs: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    scale: tl.tensor,
    log_root: tl.tensor,
    eps: tl.tensor,
    least: tl.tensor,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """y of a chunk, from the sums before it and, CAUSAL, its pairs; otherwise from the sums over all keys.

    statistics (3 or 4, pairs, time): the divisors, the largest y of every query, the sums of its phi + eps, and the log
    scale of the keys up to there (CAUSAL).
    """
    chunks = tl.cdiv(time, CHUNK)
    block = tl.program_id(0).to(tl.int64)
    pair, n = block // chunks, block % chunks
    batch, head, begin = pair // heads, pair % heads, n * CHUNK
    index, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    exists = index < time - begin
    matrix += head * features * width
    qkv += batch * by_batch + head * by_head + begin * by_time
    source = block if CAUSAL else pair
    states += source * features * width
    vectors += source * (features + width + 1)
    q = load_rows(qkv, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
    top = _largest(q, matrix, features, width, scale, CHUNK, FEATURES, WIDTH, PRECISION)
    q_shift = (half_norms(q, scale) + top + log_root)[:, None]
    above = tl.zeros((CHUNK, WIDTH), dtype=tl.float32)
    below = tl.zeros((CHUNK,), dtype=tl.float32)
    q_total = tl.zeros((CHUNK,), dtype=tl.float32)
    if CAUSAL:
        start = tl.load(reached + pair * (chunks + 1) + n)
        keys = keys_of(mask, batch * time + begin, exists, CHUNK)
        k = load_rows(qkv + by_part, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
        k_top = _largest(k, matrix, features, width, scale, CHUNK, FEATURES, WIDTH, PRECISION)
        k_top = tl.where(keys, k_top, _LEAST)
        past = index[:, None] >= index[None, :]
        reach = tl.maximum(tl.max(tl.where(past, k_top[None, :], _LEAST), 1), start)
        # the same numbers along the other axis
        reach_row = tl.maximum(tl.max(tl.where(index[:, None] <= index[None, :], k_top[:, None], _LEAST), 0), start)
        k_shift = (half_norms(k, scale) + reach + log_root)[:, None]
        weights = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        y, _ = features_of(q, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
        phi = tl.where((feature < features)[None, :], tl.exp(y - q_shift) + eps, 0.0).to(FACTOR)
        place, inside = tile_of(states, first, features, width, FEATURES, WIDTH)
        state = tl.load(place, mask=inside, other=0.0).to(FACTOR)
        counts = tl.load(vectors + feature, mask=feature < features, other=0.0)
        above += dot(phi, state, PRECISION)
        below += tl.sum(phi.to(tl.float32) * counts[None, :], 1)
        q_total += tl.sum(phi.to(tl.float32), 1)
        if CAUSAL:
            y, _ = features_of(k, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
            k_phi = tl.exp(tl.where(keys[:, None], y - k_shift, float("-inf"))).to(FACTOR)
            weights += dot(phi, tl.trans(k_phi), PRECISION)
    eps_weight = q_total * eps
    if CAUSAL:
        decay = tl.exp(start - reach)
        above *= decay[:, None]
        below *= decay
        seen = past & keys[None, :]
        decays = tl.exp(tl.minimum(reach_row[None, :] - reach[:, None], 0.0))
        weights = tl.where(seen, weights * decays + eps_weight[:, None], 0.0).to(FACTOR)
        v = load_rows(qkv + 2 * by_part, keys, width, by_time, CHUNK, WIDTH).to(FACTOR)
        above += dot(weights, v, PRECISION)
        below += tl.sum(weights.to(tl.float32), 1)
    values = tl.load(vectors + features + channel, mask=channel < width, other=0.0)
    above += eps_weight[:, None] * values[None, :]
    below += eps_weight * tl.load(vectors + features + width)
    result = above / tl.maximum(below, least)[:, None]
    out += ((batch * time + begin) * heads + head) * width
    store_rows(out, result, exists, width, heads * width, CHUNK, WIDTH)
    statistics += pair * time + begin
    rows = pairs.to(tl.int64) * time
    tl.store(statistics + index, below, mask=exists)
    tl.store(statistics + rows + index, top, mask=exists)
    tl.store(statistics + 2 * rows + index, q_total, mask=exists)
    if CAUSAL:
        tl.store(statistics + 3 * rows + index, reach, mask=exists)
