"""The Triton kernels of landmark attention; gpu.py launches them, and says what for.

A program has one head and a span of its time, of which it takes TIME positions at a time. Matrices of landmarks,
(c, d), stay with it. LANDMARKS and WIDTH are c and d as powers of two; entries beyond c and d are zeros. Products run
on tensor cores in the precision of qkv, and all else in float32.
"""

import triton
import triton.language as tl

from subquad.kernels.landmark_attention import LEAST_WEIGHT
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.triton_tools import dot

_least_weight = tl.constexpr(LEAST_WEIGHT)
_mask_value = tl.constexpr(MASK_VALUE)


@triton.jit
def load_matrix(
    source: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Rows from `first` on of a matrix (count, width), with zeros beyond it: (ROWS, WIDTH)."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    exists = (row < count - first)[:, None] & (column < width)[None, :]
    source += tl.cast(first, tl.int64) * stride
    return tl.load(source + row[:, None] * stride + column[None, :], mask=exists, other=0.0)


@triton.jit
def load_landmarks(
    source: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    LANDMARKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """scale times a matrix (c, d), in float32."""
    return load_matrix(source, 0, stride, count, width, LANDMARKS, WIDTH).to(tl.float32) * scale


@triton.jit
def store_matrix(
    target: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    values: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    exists = (row < count - first)[:, None] & (column < width)[None, :]
    target += tl.cast(first, tl.int64) * stride
    tl.store(target + row[:, None] * stride + column[None, :], values.to(target.dtype.element_ty), mask=exists)


@triton.jit
def precise_dot(landmarks: tl.tensor, x: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """landmarks @ x, of float32 and what may be narrower: landmarks are then the sum of two narrow matrices.

    Logits are exponents, and the gradient of a weight is divided by the weight, which may be small: landmarks rounded
    once would change both by percents.
    """
    high = landmarks.to(x.dtype)
    product = dot(high, x, PRECISION)
    if x.dtype != tl.float32:
        product += dot((landmarks - high.to(tl.float32)).to(x.dtype), x, PRECISION)
    return product


@triton.jit
def _hide(
    logits: tl.tensor, mask: tl.tensor, first: tl.tensor, time: tl.tensor, HAS_MASK: tl.constexpr, TIME: tl.constexpr
) -> tl.tensor:
    """Logits (LANDMARKS, TIME) of keys that count; others get no weight, and those beyond the end not even a share."""
    position = first + tl.arange(0, TIME)
    if HAS_MASK:
        counts = tl.load(mask + position, mask=position < time, other=0) != 0
        logits = tl.where(counts[None, :], logits, _mask_value)
    return tl.where((position < time)[None, :], logits, float("-inf"))


@triton.jit
def key_logits(
    w: tl.tensor,
    k: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    time: tl.tensor,
    scale: tl.tensor,
    HAS_MASK: tl.constexpr,
    TIME: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """l_cj (LANDMARKS, TIME) of keys k (TIME, WIDTH). w: s w."""
    wide = k.to(tl.float32)
    logits = precise_dot(w, tl.trans(k), PRECISION) - (tl.sum(wide * wide, 1) * (scale / 2))[None, :]
    return _hide(logits, mask, first, time, HAS_MASK, TIME)


@triton.jit
def _add_to_softmax(
    logits: tl.tensor, top: tl.tensor, mass: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One step of a softmax over time: exp(logits - top), the factor of what was summed before, and top and mass."""
    larger = tl.maximum(top, tl.max(logits, 1))
    decay, shares = tl.exp(top - larger), tl.exp(logits - larger[:, None])
    return shares, decay, larger, mass * decay + tl.sum(shares, 1)


@triton.jit
def summarise(
    qkv: tl.tensor,
    w: tl.tensor,
    f: tl.tensor,
    mask: tl.tensor,
    sums: tl.tensor,
    statistics: tl.tensor,
    time: tl.tensor,
    span: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    qkv_row: tl.tensor,
    qkv_time: tl.tensor,
    qkv_part: tl.tensor,
    qkv_head: tl.tensor,
    w_row: tl.tensor,
    w_head: tl.tensor,
    w_landmark: tl.tensor,
    f_row: tl.tensor,
    f_head: tl.tensor,
    f_landmark: tl.tensor,
    WEIGHTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TIME: tl.constexpr,
    LANDMARKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Of each span: sum_j exp(l_cj - m_c) v_j, (c, d); m_c and sum_j exp(l_cj - m_c), and the same two of s f_c.q_i."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    dtype = qkv.dtype.element_ty
    qkv += row * qkv_row + head * qkv_head
    if HAS_MASK:
        mask += row * time
    keys = load_landmarks(w + row * w_row + head * w_head, w_landmark, count, width, scale, LANDMARKS, WIDTH)
    top, mass = tl.full((LANDMARKS,), float("-inf"), tl.float32), tl.zeros((LANDMARKS,), tl.float32)
    total = tl.zeros((LANDMARKS, WIDTH), tl.float32)
    if WEIGHTED:
        directions = load_landmarks(f + row * f_row + head * f_head, f_landmark, count, width, scale, LANDMARKS, WIDTH)
        top_f, mass_f = tl.full((LANDMARKS,), float("-inf"), tl.float32), tl.zeros((LANDMARKS,), tl.float32)
    for first in range(split * span, tl.minimum(time, (split + 1) * span), TIME):
        k = load_matrix(qkv + qkv_part, first, qkv_time, time, width, TIME, WIDTH)
        v = load_matrix(qkv + 2 * qkv_part, first, qkv_time, time, width, TIME, WIDTH)
        logits = key_logits(keys, k, mask, first, time, scale, HAS_MASK, TIME, PRECISION)
        shares, decay, top, mass = _add_to_softmax(logits, top, mass)
        total = total * decay[:, None] + dot(shares.to(dtype), v, PRECISION)
        if WEIGHTED:
            q = load_matrix(qkv, first, qkv_time, time, width, TIME, WIDTH)
            logits = _hide(precise_dot(directions, tl.trans(q), PRECISION), mask, first, time, HAS_MASK, TIME)
            _, _, top_f, mass_f = _add_to_softmax(logits, top_f, mass_f)
    place = pair * tl.num_programs(1) + split
    store_matrix(sums + place * count * width, 0, width, count, width, total, LANDMARKS, WIDTH)
    landmark = tl.arange(0, LANDMARKS)
    exists, statistics = landmark < count, statistics + place * 4 * count + landmark
    tl.store(statistics, top, mask=exists)
    tl.store(statistics + count, mass, mask=exists)
    if WEIGHTED:
        tl.store(statistics + 2 * count, top_f, mask=exists)
        tl.store(statistics + 3 * count, mass_f, mask=exists)


@triton.jit
def _log_sum(
    statistics: tl.tensor, splits: tl.tensor, count: tl.tensor, LANDMARKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest of the tops of all spans, and log sum exp of all logits; entries beyond c are 0 and infinite."""
    landmark = tl.arange(0, LANDMARKS)
    exists = landmark < count
    top, mass = tl.full((LANDMARKS,), float("-inf"), tl.float32), tl.zeros((LANDMARKS,), tl.float32)
    for split in range(splits):
        one = tl.load(statistics + split * 4 * count + landmark, mask=exists, other=0.0)
        share = tl.load(statistics + (split * 4 + 1) * count + landmark, mask=exists, other=1.0)
        larger = tl.maximum(top, one)
        mass = mass * tl.exp(top - larger) + share * tl.exp(one - larger)
        top = larger
    return top, top + tl.log(mass)


@triton.jit(do_not_specialize=["splits"])
def combine(
    sums: tl.tensor,
    statistics: tl.tensor,
    u: tl.tensor,
    log_sums: tl.tensor,
    splits: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    WEIGHTED: tl.constexpr,
    LANDMARKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """u (c, d) of a head, LSE_j l_c and LSE_i s f_c.q_i, from those of its spans."""
    pair = tl.program_id(0).to(tl.int64)
    statistics += pair * splits * 4 * count
    landmark = tl.arange(0, LANDMARKS)
    exists = landmark < count
    _, log_sum = _log_sum(statistics, splits, count, LANDMARKS)
    total = tl.zeros((LANDMARKS, WIDTH), tl.float32)
    for split in range(splits):
        top = tl.load(statistics + split * 4 * count + landmark, mask=exists, other=0.0)
        part = load_matrix(sums + (pair * splits + split) * count * width, 0, width, count, width, LANDMARKS, WIDTH)
        total += part * tl.exp(tl.where(exists, top - log_sum, 0.0))[:, None]
    store_matrix(u + pair * count * width, 0, width, count, width, total, LANDMARKS, WIDTH)
    tl.store(log_sums + pair * 2 * count + landmark, log_sum, mask=exists)
    log_sum = tl.zeros((LANDMARKS,), tl.float32)
    if WEIGHTED:
        _, log_sum = _log_sum(statistics + 2 * count, splits, count, LANDMARKS)
    tl.store(log_sums + (pair * 2 + 1) * count + landmark, log_sum, mask=exists)


@triton.jit
def load_vectors(
    pair: tl.tensor,
    row: tl.tensor,
    shared: tl.tensor,
    balance: tl.tensor,
    mean_weights: tl.tensor,
    log_sums: tl.tensor,
    count: tl.tensor,
    mean_row: tl.tensor,
    WEIGHTED: tl.constexpr,
    LANDMARKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """b_c + LSE_j l_c, which is -inf beyond c, LSE_i s f_c.q_i, beta and p."""
    landmark = tl.arange(0, LANDMARKS)
    exists = landmark < count
    offset = tl.load(shared + pair * count + landmark, mask=exists, other=float("-inf")).to(tl.float32)
    offset += tl.load(log_sums + pair * 2 * count + landmark, mask=exists, other=0.0)
    log_f, beta, p = offset, offset, offset
    if WEIGHTED:
        log_f = tl.load(log_sums + (pair * 2 + 1) * count + landmark, mask=exists, other=float("inf"))
        beta = tl.load(balance + pair * count + landmark, mask=exists, other=0.0).to(tl.float32)
        p = tl.load(mean_weights + row * mean_row + landmark, mask=exists, other=0.0).to(tl.float32)
    return offset, log_f, beta, p


@triton.jit
def query_probs(
    q: tl.tensor,
    w: tl.tensor,
    f: tl.tensor,
    offset: tl.tensor,
    log_f: tl.tensor,
    beta: tl.tensor,
    p: tl.tensor,
    alpha: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    time: tl.tensor,
    WEIGHTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TIME: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """W, t and a, each (LANDMARKS, TIME), of queries q (TIME, WIDTH); a is infinite where it is at its least."""
    queries = tl.trans(q)
    z = precise_dot(w, queries, PRECISION) + offset[:, None]
    shares = tl.exp(z - tl.max(z, 0)[None, :])
    t, a = shares, shares
    if WEIGHTED:
        logits = _hide(precise_dot(f, queries, PRECISION), mask, first, time, HAS_MASK, TIME)
        t = tl.exp(logits - log_f[:, None])
        a = beta[:, None] + alpha * (t - tl.sum(t * p[:, None], 0)[None, :])
        shares *= tl.maximum(a, _least_weight)
        a = tl.where(a > _least_weight, a, float("inf"))
    return shares / tl.sum(shares, 0)[None, :], t, a


@triton.jit
def attend(
    qkv: tl.tensor,
    w: tl.tensor,
    f: tl.tensor,
    u: tl.tensor,
    shared: tl.tensor,
    balance: tl.tensor,
    mean_weights: tl.tensor,
    log_sums: tl.tensor,
    mask: tl.tensor,
    y: tl.tensor,
    time: tl.tensor,
    span: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    mean_row: tl.tensor,
    scale: tl.tensor,
    alpha: tl.tensor,
    qkv_row: tl.tensor,
    qkv_time: tl.tensor,
    qkv_head: tl.tensor,
    w_row: tl.tensor,
    w_head: tl.tensor,
    w_landmark: tl.tensor,
    f_row: tl.tensor,
    f_head: tl.tensor,
    f_landmark: tl.tensor,
    WEIGHTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TIME: tl.constexpr,
    LANDMARKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """y_i = sum_c W_ci u_c of a span; y: (batch, time, heads, d), contiguous."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    dtype = qkv.dtype.element_ty
    qkv += row * qkv_row + head * qkv_head
    y += row * time * heads * width + head * width
    if HAS_MASK:
        mask += row * time
    queries = load_landmarks(w + row * w_row + head * w_head, w_landmark, count, width, scale, LANDMARKS, WIDTH)
    directions = queries
    if WEIGHTED:
        directions = load_landmarks(f + row * f_row + head * f_head, f_landmark, count, width, scale, LANDMARKS, WIDTH)
    values = load_landmarks(u + pair * count * width, width, count, width, 1.0, LANDMARKS, WIDTH).to(dtype)
    offset, log_f, beta, p = load_vectors(
        pair, row, shared, balance, mean_weights, log_sums, count, mean_row, WEIGHTED, LANDMARKS
    )
    for first in range(split * span, tl.minimum(time, (split + 1) * span), TIME):
        q = load_matrix(qkv, first, qkv_time, time, width, TIME, WIDTH)
        probs, _, _ = query_probs(
            q, queries, directions, offset, log_f, beta, p, alpha, mask, first, time,
            WEIGHTED, HAS_MASK, TIME, PRECISION,
        )  # fmt: skip
        found = dot(tl.trans(probs.to(dtype)), values, PRECISION)
        store_matrix(y, first, heads * width, time, width, found, TIME, WIDTH)
