"""Triton kernels of the gradients of landmark attention; programs are as in gpu_kernels.py."""

import triton
import triton.language as tl

from subquad.kernels.landmark_attention.gpu_kernels import (
    key_logits,
    load_landmarks,
    load_matrix,
    load_vectors,
    query_probs,
    store_matrix,
)
from subquad.kernels.triton_tools import dot


@triton.jit
def query_gradients(
    qkv: tl.tensor,
    grad: tl.tensor,
    w: tl.tensor,
    f: tl.tensor,
    u: tl.tensor,
    shared: tl.tensor,
    balance: tl.tensor,
    mean_weights: tl.tensor,
    log_sums: tl.tensor,
    mask: tl.tensor,
    means: tl.tensor,
    d_qkv: tl.tensor,
    matrices: tl.tensor,
    vectors: tl.tensor,
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
    SUMS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TIME: tl.constexpr,
    LANDMARKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """With dz = W (g.u - sum_c W g.u), da = dz / a and dt = alpha (da - p sum_c da), for a span of queries.

    SUMS, over the span: du = sum_i W g and dw' = s sum_i dz q to `matrices`, (2, c, d); sum_i dz, sum_i da and
    sum_i t dt to `vectors`, (3, c). Otherwise, where `means` (c,) is the last of these over the whole time and
    df.q = t (dt - mean): dq = s (sum_c dz w' + sum_c df.q f) to d_qkv, and s sum_i df.q q to `matrices`, (c, d).
    """
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    dtype = qkv.dtype.element_ty
    qkv += row * qkv_row + head * qkv_head
    grad += row * time * heads * width + head * width
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
    landmark = tl.arange(0, LANDMARKS)
    exists = landmark < count
    first_sum = tl.zeros((LANDMARKS, WIDTH), tl.float32)
    if SUMS:
        second_sum = tl.zeros((LANDMARKS, WIDTH), tl.float32)
        sum_z = tl.zeros((LANDMARKS,), tl.float32)
        sum_a = tl.zeros((LANDMARKS,), tl.float32)
        sum_t = tl.zeros((LANDMARKS,), tl.float32)
    else:
        d_qkv += row * time * 3 * heads * width + head * width
        if WEIGHTED:
            mean = tl.load(means + pair * 3 * count + landmark, mask=exists, other=0.0)
    for first in range(split * span, tl.minimum(time, (split + 1) * span), TIME):
        q = load_matrix(qkv, first, qkv_time, time, width, TIME, WIDTH)
        g = load_matrix(grad, first, heads * width, time, width, TIME, WIDTH)
        probs, t, a = query_probs(
            q, queries, directions, offset, log_f, beta, p, alpha, mask, first, time,
            WEIGHTED, HAS_MASK, TIME, PRECISION,
        )  # fmt: skip
        d_z = dot(values, tl.trans(g), PRECISION)
        d_z = probs * (d_z - tl.sum(probs * d_z, 0)[None, :])
        if SUMS:
            first_sum += dot(probs.to(dtype), g, PRECISION)
            second_sum += dot(d_z.to(dtype), q, PRECISION)
            sum_z += tl.sum(d_z, 1)
        else:
            d_q = dot(tl.trans(d_z.to(dtype)), queries.to(dtype), PRECISION)
        if WEIGHTED:
            d_a = d_z / a
            d_t = alpha * (d_a - p[:, None] * tl.sum(d_a, 0)[None, :])
            if SUMS:
                sum_a += tl.sum(d_a, 1)
                sum_t += tl.sum(t * d_t, 1)
            else:
                d_f = t * (d_t - mean[:, None])
                if HAS_MASK:
                    position = first + tl.arange(0, TIME)
                    counts = tl.load(mask + position, mask=position < time, other=0) != 0
                    d_f = tl.where(counts[None, :], d_f, 0.0)
                first_sum += dot(d_f.to(dtype), q, PRECISION)
                d_q += dot(tl.trans(d_f.to(dtype)), directions.to(dtype), PRECISION)
        if not SUMS:
            store_matrix(d_qkv, first, 3 * heads * width, time, width, d_q, TIME, WIDTH)
    place = pair * tl.num_programs(1) + split
    if SUMS:
        matrices += place * 2 * count * width
        store_matrix(matrices, 0, width, count, width, first_sum, LANDMARKS, WIDTH)
        store_matrix(matrices + count * width, 0, width, count, width, second_sum * scale, LANDMARKS, WIDTH)
        vectors += place * 3 * count + landmark
        tl.store(vectors, sum_z, mask=exists)
        tl.store(vectors + count, sum_a, mask=exists)
        tl.store(vectors + 2 * count, sum_t, mask=exists)
    elif WEIGHTED:
        store_matrix(matrices + place * count * width, 0, width, count, width, first_sum * scale, LANDMARKS, WIDTH)


@triton.jit
def key_gradients(
    qkv: tl.tensor,
    w: tl.tensor,
    u: tl.tensor,
    d_u: tl.tensor,
    d_shared: tl.tensor,
    log_sums: tl.tensor,
    mask: tl.tensor,
    d_qkv: tl.tensor,
    d_w: tl.tensor,
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
    HAS_MASK: tl.constexpr,
    TIME: tl.constexpr,
    LANDMARKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """With dl = A (v.du + db - u.du), for a span of keys: dk = s sum_c dl (w - k) and dv = sum_c A du to d_qkv.

    s sum_j dl k, over the span, to d_w. d_u: (pairs, 2, c, d) and d_shared: (pairs, 3, c), the first of each.
    """
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    dtype = qkv.dtype.element_ty
    qkv += row * qkv_row + head * qkv_head
    d_qkv += row * time * 3 * heads * width + head * width
    if HAS_MASK:
        mask += row * time
    keys = load_landmarks(w + row * w_row + head * w_head, w_landmark, count, width, scale, LANDMARKS, WIDTH)
    grad = load_landmarks(d_u + 2 * pair * count * width, width, count, width, 1.0, LANDMARKS, WIDTH)
    landmark = tl.arange(0, LANDMARKS)
    exists = landmark < count
    constant = tl.load(d_shared + pair * 3 * count + landmark, mask=exists, other=0.0)
    constant -= tl.sum(load_landmarks(u + pair * count * width, width, count, width, 1.0, LANDMARKS, WIDTH) * grad, 1)
    log_sum = tl.load(log_sums + pair * 2 * count + landmark, mask=exists, other=float("inf"))
    grad = grad.to(dtype)
    total = tl.zeros((LANDMARKS, WIDTH), tl.float32)
    for first in range(split * span, tl.minimum(time, (split + 1) * span), TIME):
        k = load_matrix(qkv + qkv_part, first, qkv_time, time, width, TIME, WIDTH)
        v = load_matrix(qkv + 2 * qkv_part, first, qkv_time, time, width, TIME, WIDTH)
        logits = key_logits(keys, k, mask, first, time, scale, HAS_MASK, TIME, PRECISION)
        probs = tl.exp(logits - log_sum[:, None])
        d_l = probs * (dot(grad, tl.trans(v), PRECISION) + constant[:, None])
        if HAS_MASK:
            position = first + tl.arange(0, TIME)
            counts = tl.load(mask + position, mask=position < time, other=0) != 0
            d_l = tl.where(counts[None, :], d_l, 0.0)
        narrow = d_l.to(dtype)
        total += dot(narrow, k, PRECISION)
        d_k = dot(tl.trans(narrow), keys.to(dtype), PRECISION) - k.to(tl.float32) * (tl.sum(d_l, 0) * scale)[:, None]
        d_v = dot(tl.trans(probs.to(dtype)), grad, PRECISION)
        store_matrix(d_qkv + heads * width, first, 3 * heads * width, time, width, d_k, TIME, WIDTH)
        store_matrix(d_qkv + 2 * heads * width, first, 3 * heads * width, time, width, d_v, TIME, WIDTH)
    place = pair * tl.num_programs(1) + split
    store_matrix(d_w + place * count * width, 0, width, count, width, total * scale, LANDMARKS, WIDTH)
