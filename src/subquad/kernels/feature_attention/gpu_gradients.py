"""Triton kernels of the gradients of linear attention through exponential features: see `gpu.py`.

With the gradient g of y, h_i = g_i / divisor_i and e_i = -h_i . y_i (0 where the divisor was clamped), a query i and a
key j it sees have the weight A_ij = (phi_i + eps) . (phi_j D_ij + eps), with the change of scale D_ij = exp(l_j - l_i),
whose gradient is dA_ij = h_i . v_j + e_i. Hence

    d phi_i = sum_j dA_ij (D_ij phi_j + eps)      d phi_j = sum_i dA_ij D_ij (phi_i + eps)      d v_j = sum_i A_ij h_i

Sums over keys of other chunks come from the forward, those over queries of other chunks from `sum_queries`. Scales are
constants, so the gradient of W t d^(-1/4) is d phi * phi, and that of |t|^2 d^(-1/2) / 2 its negative sum. Queries and
keys have a kernel each: what both need at once does not fit the registers.
"""

import triton
import triton.language as tl

from subquad.kernels.feature_attention.gpu_kernels import (
    features_of,
    half_norms,
    keys_of,
    load_rows,
    rows_of,
    scores_of,
    store_rows,
    tile_of,
)
from subquad.kernels.triton_tools import dot


@triton.jit
def _divided(
    grad: tl.tensor,
    divisors: tl.tensor,
    exists: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
) -> tl.tensor:
    """h (CHUNK, WIDTH), rounded as products take it."""
    g = load_rows(grad, exists, width, stride, CHUNK, WIDTH).to(tl.float32)
    divisor = tl.load(divisors + tl.arange(0, CHUNK), mask=exists, other=1.0)
    return (g / tl.maximum(divisor, least)[:, None]).to(FACTOR)


@triton.jit
def _store_gradient(
    base: tl.tensor,
    d_t: tl.tensor,
    d_c: tl.tensor,
    t: tl.tensor,
    exists: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The gradient of tokens t, through y and through c."""
    d_t -= t.to(tl.float32) * (d_c * scale * scale)[:, None]
    store_rows(base, d_t, exists, width, stride, CHUNK, WIDTH)


@triton.jit
def _store_of_matrix(
    base: tl.tensor,
    d_y: tl.tensor,
    t: tl.tensor,
    first: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """What the tokens t of a chunk add to the gradient of W."""
    place, inside = tile_of(base, first, features, width, FEATURES, WIDTH)
    tl.store(place, dot(tl.trans(d_y), t, PRECISION) * scale, mask=inside)


@triton.jit(do_not_specialize=["time"])
def sum_queries(
    qkv: tl.tensor,
    matrix: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    statistics: tl.tensor,
    reached: tl.tensor,
    slopes: tl.tensor,
    sums: tl.tensor,
    vectors: tl.tensor,
    pairs: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_head: tl.tensor,
    grad_batch: tl.tensor,
    grad_time: tl.tensor,
    grad_head: tl.tensor,
    scale: tl.tensor,
    log_root: tl.tensor,
    eps: tl.tensor,
    least: tl.tensor,
    CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Of BLOCKS chunks: sum_i D_i (phi_i + eps) h_i^T (m, d), and [sum_i D_i (phi_i + eps) e_i | sum_i s_i h_i], m + d.

    s_i = sum of phi_i + eps; D_i = exp(l before the chunk - l_i) if CAUSAL, then of one chunk, else 1. slopes: e.
    """
    segments = tl.cdiv(time, BLOCKS * CHUNK)
    segment = tl.program_id(0).to(tl.int64)
    pair, n = segment // segments, segment % segments
    batch, head = pair // heads, pair % heads
    first_feature = tl.program_id(1) * FEATURES
    index, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    feature = first_feature + tl.arange(0, FEATURES)
    matrix += head * features * width
    rows = pairs.to(tl.int64) * time
    total = tl.zeros((FEATURES, WIDTH), dtype=tl.float32)
    counts = tl.zeros((FEATURES,), dtype=tl.float32)
    values = tl.zeros((WIDTH,), dtype=tl.float32)
    rows_of_matrix = rows_of(matrix, first_feature, features, width, scale, FEATURES, WIDTH, FACTOR)
    for block in range(BLOCKS):
        begin = (n * BLOCKS + block) * CHUNK
        exists = index < time - begin
        own = statistics + pair * time + begin
        h = _divided(
            grad + batch * grad_batch + begin * grad_time + head * grad_head,
            own, exists, width, grad_time, least, CHUNK, WIDTH, FACTOR,
        )  # fmt: skip
        out_rows = out + ((batch * time + begin) * heads + head) * width
        outputs = load_rows(out_rows, exists, width, heads * width, CHUNK, WIDTH).to(tl.float32)
        unclamped = tl.load(own + index, mask=exists, other=0.0) >= least
        e = tl.where(unclamped, -tl.sum(h.to(tl.float32) * outputs, 1), 0.0)
        tl.store(slopes + pair * time + begin + index, e, mask=exists & (tl.program_id(1) == 0))
        q = load_rows(qkv + batch * by_batch + head * by_head + begin * by_time, exists, width, by_time, CHUNK, WIDTH)
        q = q.to(FACTOR)
        y = scores_of(q, rows_of_matrix, first_feature, features, FEATURES, PRECISION)
        top = tl.load(own + rows + index, mask=exists, other=0.0)
        q_total = tl.load(own + 2 * rows + index, mask=exists, other=0.0)
        phi = tl.exp(y - (half_norms(q, scale) + top + log_root)[:, None]) + eps
        if CAUSAL:
            reach = tl.load(own + 3 * rows + index, mask=exists, other=0.0)
            start = tl.load(reached + pair * (segments + 1) + n)
            phi *= tl.exp(tl.minimum(start - reach, 0.0))[:, None]
        total += dot(tl.trans(phi.to(FACTOR)), h, PRECISION)
        counts += tl.sum(phi * e[:, None], 0)
        values += tl.sum(h.to(tl.float32) * q_total[:, None], 0)
    place, inside = tile_of(sums + segment * features * width, first_feature, features, width, FEATURES, WIDTH)
    tl.store(place, total, mask=inside)
    vectors += segment * (features + width)
    tl.store(vectors + feature, counts, mask=feature < features)
    tl.store(vectors + features + channel, values, mask=(channel < width) & (tl.program_id(1) == 0))


@triton.jit(do_not_specialize=["time"])
def query_gradients(
    qkv: tl.tensor,
    matrix: tl.tensor,
    mask: tl.tensor | None,
    grad: tl.tensor,
    statistics: tl.tensor,
    slopes: tl.tensor,
    reached: tl.tensor,
    states: tl.tensor,
    vectors: tl.tensor,
    d_qkv: tl.tensor,
    d_matrix: tl.tensor | None,
    pairs: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    grad_batch: tl.tensor,
    grad_time: tl.tensor,
    grad_head: tl.tensor,
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
    """Gradients of the queries of a chunk, and what they add to that of W.

    states, vectors: the sums over keys. d_qkv: (batch, time, 3, heads, d); d_matrix: (pairs, chunks, m, d).
    """
    chunks = tl.cdiv(time, CHUNK)
    block = tl.program_id(0).to(tl.int64)
    pair, n = block // chunks, block % chunks
    batch, head, begin = pair // heads, pair % heads, n * CHUNK
    index, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    exists = index < time - begin
    token, row, per_token = batch * time + begin, pairs.to(tl.int64) * time, heads * width
    matrix += head * features * width
    qkv += batch * by_batch + head * by_head + begin * by_time
    grad += batch * grad_batch + begin * grad_time + head * grad_head
    d_qkv += (token * 3 * heads + head) * width
    statistics += pair * time + begin
    slopes += pair * time + begin
    source = block if CAUSAL else pair
    states += source * features * width
    vectors += source * (features + width + 1)
    h = _divided(grad, statistics, exists, width, grad_time, least, CHUNK, WIDTH, FACTOR)
    e = tl.load(slopes + index, mask=exists, other=0.0)
    values = tl.load(vectors + features + channel, mask=channel < width, other=0.0)
    # what every feature of a query gets through eps
    through_eps = tl.sum(h.to(tl.float32) * values[None, :], 1) + e * tl.load(vectors + features + width)
    q = load_rows(qkv, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
    top = tl.load(statistics + row + index, mask=exists, other=0.0)
    q_shift = (half_norms(q, scale) + top + log_root)[:, None]
    if CAUSAL:
        keys = keys_of(mask, token, exists, CHUNK)
        k = load_rows(qkv + by_part, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
        v = load_rows(qkv + 2 * by_part, keys, width, by_time, CHUNK, WIDTH).to(FACTOR)
        reach = tl.load(statistics + 3 * row + index, mask=exists, other=0.0)
        seen = (index[:, None] >= index[None, :]) & keys[None, :]
        d_weights = tl.where(seen, dot(h, tl.trans(v), PRECISION) + e[:, None], 0.0)
        through_eps += tl.sum(d_weights, 1)
        d_weights = (d_weights * tl.exp(tl.minimum(reach[None, :] - reach[:, None], 0.0))).to(FACTOR)
        since_start = tl.exp(tl.minimum(tl.load(reached + pair * (chunks + 1) + n) - reach, 0.0))
        k_shift = (half_norms(k, scale) + reach + log_root)[:, None]
    d_t = tl.zeros((CHUNK, WIDTH), dtype=tl.float32)
    d_c = tl.zeros((CHUNK,), dtype=tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        place, inside = tile_of(states, first, features, width, FEATURES, WIDTH)
        state = tl.load(place, mask=inside, other=0.0).to(FACTOR)
        counts = tl.load(vectors + feature, mask=feature < features, other=0.0)
        d_phi = dot(h, tl.trans(state), PRECISION) + e[:, None] * counts[None, :]
        if CAUSAL:
            y, _ = features_of(k, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
            k_phi = tl.exp(tl.where(keys[:, None], y - k_shift, float("-inf"))).to(FACTOR)
            d_phi = d_phi * since_start[:, None] + dot(d_weights, k_phi, PRECISION)
        y, rows = features_of(q, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
        d_y = tl.exp(y - q_shift) * (d_phi + eps * through_eps[:, None])
        d_c += tl.sum(d_y, 1)
        d_t += dot(d_y.to(FACTOR), rows, PRECISION)
        if d_matrix is not None:
            base = d_matrix + block * features * width
            _store_of_matrix(base, d_y.to(FACTOR), q, first, features, width, scale, FEATURES, WIDTH, PRECISION)
    _store_gradient(d_qkv, d_t, d_c, q, exists, width, 3 * per_token, scale, CHUNK, WIDTH)


@triton.jit(do_not_specialize=["time"])
def key_gradients(
    qkv: tl.tensor,
    matrix: tl.tensor,
    mask: tl.tensor | None,
    grad: tl.tensor,
    statistics: tl.tensor,
    slopes: tl.tensor,
    reached: tl.tensor,
    states: tl.tensor,
    vectors: tl.tensor,
    d_qkv: tl.tensor,
    d_matrix: tl.tensor | None,
    pairs: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_part: tl.tensor,
    by_head: tl.tensor,
    grad_batch: tl.tensor,
    grad_time: tl.tensor,
    grad_head: tl.tensor,
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
    """Gradients of the keys and values of a chunk, and what the keys add to that of W.

    states, vectors: the sums over queries. Matrices of pairs have a row for each key here.
    """
    chunks = tl.cdiv(time, CHUNK)
    block = tl.program_id(0).to(tl.int64)
    pair, n = block // chunks, block % chunks
    batch, head, begin = pair // heads, pair % heads, n * CHUNK
    index, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    exists = index < time - begin
    token, row, per_token = batch * time + begin, pairs.to(tl.int64) * time, heads * width
    matrix += head * features * width
    qkv += batch * by_batch + head * by_head + begin * by_time
    grad += batch * grad_batch + begin * grad_time + head * grad_head
    d_qkv += (token * 3 * heads + head) * width
    statistics += pair * time + begin
    slopes += pair * time + begin
    source = block if CAUSAL else pair
    states += source * features * width
    vectors += source * (features + width)
    keys = keys_of(mask, token, exists, CHUNK)
    k = load_rows(qkv + by_part, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
    v = load_rows(qkv + 2 * by_part, keys, width, by_time, CHUNK, WIDTH).to(FACTOR)
    if CAUSAL:
        q = load_rows(qkv, exists, width, by_time, CHUNK, WIDTH).to(FACTOR)
        h = _divided(grad, statistics, exists, width, grad_time, least, CHUNK, WIDTH, FACTOR)
        e = tl.load(slopes + index, mask=exists, other=0.0)
        top = tl.load(statistics + row + index, mask=exists, other=0.0)
        reach = tl.load(statistics + 3 * row + index, mask=exists, other=0.0)
        q_shift = (half_norms(q, scale) + top + log_root)[:, None]
        seen = (index[:, None] <= index[None, :]) & keys[:, None]
        decays = tl.where(seen, tl.exp(tl.minimum(reach[:, None] - reach[None, :], 0.0)), 0.0)
        d_weights = ((dot(v, tl.trans(h), PRECISION) + e[None, :]) * decays).to(FACTOR)
        until_end = tl.exp(tl.minimum(reach - tl.load(reached + pair * (chunks + 1) + n + 1), 0.0))
    else:
        reach = tl.zeros((CHUNK,), dtype=tl.float32) + tl.load(reached + pair)
    k_shift = (half_norms(k, scale) + reach + log_root)[:, None]
    d_t = tl.zeros((CHUNK, WIDTH), dtype=tl.float32)
    d_c = tl.zeros((CHUNK,), dtype=tl.float32)
    d_v = tl.zeros((CHUNK, WIDTH), dtype=tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        y, rows = features_of(k, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
        phi = tl.exp(tl.where(keys[:, None], y - k_shift, float("-inf")))
        place, inside = tile_of(states, first, features, width, FEATURES, WIDTH)
        state = tl.load(place, mask=inside, other=0.0).to(FACTOR)
        counts = tl.load(vectors + feature, mask=feature < features, other=0.0)
        d_phi = dot(v, tl.trans(state), PRECISION) + counts[None, :]
        d_v += dot(phi.to(FACTOR), state, PRECISION)
        if CAUSAL:
            y, _ = features_of(q, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
            q_phi = tl.where((feature < features)[None, :], tl.exp(y - q_shift) + eps, 0.0).to(FACTOR)
            d_phi = d_phi * until_end[:, None] + dot(d_weights, q_phi, PRECISION)
        d_y = phi * d_phi
        d_c += tl.sum(d_y, 1)
        d_t += dot(d_y.to(FACTOR), rows, PRECISION)
        if d_matrix is not None:
            base = d_matrix + block * features * width
            _store_of_matrix(base, d_y.to(FACTOR), k, first, features, width, scale, FEATURES, WIDTH, PRECISION)
    _store_gradient(d_qkv + per_token, d_t, d_c, k, exists, width, 3 * per_token, scale, CHUNK, WIDTH)
    if CAUSAL:
        # a loop of its own, and what is loaded again: there are no registers to keep it all in
        weights = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        for first in range(0, features, FEATURES):
            feature = first + tl.arange(0, FEATURES)
            y, _ = features_of(q, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
            q_phi = tl.where((feature < features)[None, :], tl.exp(y - q_shift) + eps, 0.0).to(FACTOR)
            y, _ = features_of(k, matrix, first, features, width, scale, FEATURES, WIDTH, PRECISION)
            phi = tl.exp(tl.where(keys[:, None], y - k_shift, float("-inf"))).to(FACTOR)
            weights += dot(phi, tl.trans(q_phi), PRECISION)
        h = _divided(grad, statistics, exists, width, grad_time, least, CHUNK, WIDTH, FACTOR)
        q_total = tl.load(statistics + 2 * row + index, mask=exists, other=0.0)
        reach = tl.load(statistics + 3 * row + index, mask=exists, other=0.0)
        decays = tl.exp(tl.minimum(reach[:, None] - reach[None, :], 0.0))
        weights = tl.where(seen, weights * decays + (q_total * eps)[None, :], 0.0)
        d_v = d_v * until_end[:, None] + dot(weights.to(FACTOR), h, PRECISION)
    d_v += eps * tl.load(vectors + features + channel, mask=channel < width, other=0.0)[None, :]
    store_rows(d_qkv + 2 * per_token, tl.where(keys[:, None], d_v, 0.0), exists, width, 3 * per_token, CHUNK, WIDTH)
