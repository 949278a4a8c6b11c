"""Triton kernels of the gradients of window attention; programs are as in gpu_kernels.py.

With p the probabilities, g the gradient of y and delta_i = y_i . g_i:
    d v_j = sum_i p_ij g_i        d logit_ij = p_ij (g_i . v_j - delta_i)
    d q_i = s sum_j d logit_ij k_j        d k_j = s sum_i d logit_ij q_i
"""

import triton
import triton.language as tl

from subquad.kernels.triton_tools import dot
from subquad.kernels.window_attention.gpu_kernels import VARYING
from subquad.kernels.window_attention.gpu_tiles import (
    corner,
    kept,
    load,
    places,
    store,
    summaries_seen,
    summary_tile,
    window_logits,
    window_tile,
)


@triton.jit(do_not_specialize=VARYING)
def query_gradients(
    grad: tl.tensor,
    y: tl.tensor,
    log_sums: tl.tensor,
    qkv: tl.tensor,
    bias: tl.tensor,
    mask: tl.tensor,
    far_k: tl.tensor,
    far_v: tl.tensor,
    far_mask: tl.tensor,
    chunks: tl.tensor,
    d_qkv: tl.tensor,
    deltas: tl.tensor,
    row_stride: tl.tensor,
    cell_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    bias_head: tl.tensor,
    bias_query: tl.tensor,
    bias_key: tl.tensor,
    mask_stride: tl.tensor,
    far_mask_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    windows: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    chunk: tl.tensor,
    WINDOW: tl.constexpr,
    BACK: tl.constexpr,
    SIDE: tl.constexpr,
    AXES: tl.constexpr,
    CAUSAL: tl.constexpr,
    LATER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """d q of QUERIES queries, and their deltas.

    grad, y: (batch, cells, heads, WIDTH); d_qkv: (batch, cells, 3, heads, WIDTH); log_sums, deltas: (batch, heads,
    cells).
    """
    CELLS: tl.constexpr = WINDOW**AXES
    TILES: tl.constexpr = (CELLS + QUERIES - 1) // QUERIES
    head = tl.program_id(1)
    row = (tl.program_id(0) // TILES // windows).to(tl.int64)
    top, left = corner(tl.program_id(0) // TILES % windows, columns, WINDOW, AXES)
    first = tl.program_id(0) % TILES * QUERIES
    cells, origin, pair = rows * columns, top.to(tl.int64) * columns + left, row * heads + head
    source = qkv + row * row_stride + origin * cell_stride + head * head_stride
    if mask is not None:
        mask += row * mask_stride + origin
    if bias is not None:
        bias += head * bias_head
    query = first + tl.arange(0, QUERIES)
    place, exists = places(query, top, left, rows, columns, 0, WINDOW, AXES)
    q = load(source, place, exists, cell_stride, WIDTH, CHANNELS)
    from_origin = ((row * cells + origin) * heads + head) * WIDTH
    g = load(grad + from_origin, place, exists, heads * WIDTH, WIDTH, CHANNELS)
    output = load(y + from_origin, place, exists, heads * WIDTH, WIDTH, CHANNELS)
    delta = tl.sum(g.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(deltas + pair * cells + origin + place, delta, mask=exists)
    log_sum = tl.load(log_sums + pair * cells + origin + place, mask=exists, other=float("inf"))
    d_q = tl.zeros((QUERIES, CHANNELS), tl.float32)
    last_key = tl.minimum(first + QUERIES + BACK, SIDE) if CAUSAL else SIDE**AXES
    for start in range(0, last_key, KEYS):
        k, v, logits = window_tile(
            q, query, exists, start, source, cell_stride, part_stride, bias, bias_query, bias_key, mask,
            top, left, rows, columns, BACK, SIDE, AXES, CAUSAL, SCALE, WIDTH, CHANNELS, KEYS, PRECISION,
        )  # fmt: skip
        d_logits = tl.exp2(logits - log_sum[:, None]) * (dot(g, tl.trans(v), PRECISION) - delta[:, None])
        d_q += dot(d_logits.to(k.dtype), k, PRECISION)
    if far_k is not None:
        limit = tl.where(exists, summaries_seen(left + query, count, chunk, chunks, row, LATER), 0)
        if far_mask is not None:
            far_mask += row * far_mask_stride
        for start in range(0, tl.max(limit, 0), COUNT):
            f, u, logits = summary_tile(
                q, limit, start, far_k + pair * count * WIDTH, far_v + pair * count * WIDTH, far_mask, count,
                SCALE, WIDTH, CHANNELS, COUNT, PRECISION,
            )  # fmt: skip
            d_logits = tl.exp2(logits - log_sum[:, None]) * (dot(g, tl.trans(u), PRECISION) - delta[:, None])
            d_q += dot(d_logits.to(f.dtype), f, PRECISION)
    target = d_qkv + ((row * cells + origin) * 3 * heads + head) * WIDTH
    store(target, place, exists, 3 * heads * WIDTH, d_q * SCALE, WIDTH, CHANNELS)


@triton.jit(do_not_specialize=VARYING)
def key_gradients(
    grad: tl.tensor,
    log_sums: tl.tensor,
    deltas: tl.tensor,
    qkv: tl.tensor,
    bias: tl.tensor,
    mask: tl.tensor,
    d_qkv: tl.tensor,
    row_stride: tl.tensor,
    cell_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    bias_head: tl.tensor,
    bias_query: tl.tensor,
    bias_key: tl.tensor,
    mask_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    windows: tl.tensor,
    heads: tl.tensor,
    WINDOW: tl.constexpr,
    BACK: tl.constexpr,
    SIDE: tl.constexpr,
    AXES: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """d k and d v of KEYS cells of a window, from the queries of all windows that see some of them."""
    CELLS: tl.constexpr = WINDOW**AXES
    TILES: tl.constexpr = (CELLS + KEYS - 1) // KEYS
    BEFORE: tl.constexpr = (SIDE - BACK - 1) // WINDOW  # windows before this one, along an axis, that see some
    AFTER: tl.constexpr = (BACK + WINDOW - 1) // WINDOW
    head = tl.program_id(1)
    row = (tl.program_id(0) // TILES // windows).to(tl.int64)
    top, left = corner(tl.program_id(0) // TILES % windows, columns, WINDOW, AXES)
    first = tl.program_id(0) % TILES * KEYS
    cells, pair = rows * columns, row * heads + head
    origin = top.to(tl.int64) * columns + left
    source = qkv + row * row_stride + head * head_stride
    if bias is not None:
        bias += head * bias_head
    cell = first + tl.arange(0, KEYS)
    place, exists = places(cell, top, left, rows, columns, 0, WINDOW, AXES)
    keys = source + origin * cell_stride
    k = load(keys + part_stride, place, exists, cell_stride, WIDTH, CHANNELS)
    v = load(keys + 2 * part_stride, place, exists, cell_stride, WIDTH, CHANNELS)
    if mask is not None:
        mask += row * mask_stride + origin
    exist = kept(mask, place, exists)
    d_k = tl.zeros((KEYS, CHANNELS), tl.float32)
    d_v = tl.zeros((KEYS, CHANNELS), tl.float32)
    first_top = tl.maximum(top - BEFORE * WINDOW, 0) if AXES == 2 else 0
    end_top = tl.minimum(top + AFTER * WINDOW + 1, rows) if AXES == 2 else 1
    for query_top in range(first_top, end_top, WINDOW):
        for query_left in range(
            tl.maximum(left - BEFORE * WINDOW, 0), tl.minimum(left + AFTER * WINDOW + 1, columns), WINDOW
        ):
            # the number of each key in that window
            if AXES == 1:
                key = left + cell - query_left + BACK
                seen = exist & (key >= 0) & (key < SIDE)
            else:
                key_row = top + cell // WINDOW - query_top + BACK
                key_column = left + cell % WINDOW - query_left + BACK
                key = key_row * SIDE + key_column
                seen = exist & (key_row >= 0) & (key_row < SIDE) & (key_column >= 0) & (key_column < SIDE)
            query_origin = tl.cast(query_top, tl.int64) * columns + query_left
            # causal: the queries from the first key on
            begin = tl.maximum(left + first - query_left, 0) // QUERIES * QUERIES if CAUSAL else 0
            for start in range(begin, CELLS, QUERIES):
                query = start + tl.arange(0, QUERIES)
                query_place, real = places(query, query_top, query_left, rows, columns, 0, WINDOW, AXES)
                from_origin = ((row * cells + query_origin) * heads + head) * WIDTH
                q = load(source + query_origin * cell_stride, query_place, real, cell_stride, WIDTH, CHANNELS)
                g = load(grad + from_origin, query_place, real, heads * WIDTH, WIDTH, CHANNELS)
                number = pair * cells + query_origin + query_place
                log_sum = tl.load(log_sums + number, mask=real, other=float("inf"))
                delta = tl.load(deltas + number, mask=real, other=0.0)
                logits = window_logits(
                    dot(k, tl.trans(q), PRECISION), query[None, :], key[:, None], seen[:, None] & real[None, :],
                    bias, bias_query, bias_key, BACK, CAUSAL, SCALE,
                )  # fmt: skip
                probs = tl.exp2(logits - log_sum[None, :])
                d_v += dot(probs.to(g.dtype), g, PRECISION)
                d_logits = probs * (dot(v, tl.trans(g), PRECISION) - delta[None, :])
                d_k += dot(d_logits.to(q.dtype), q, PRECISION)
    target = d_qkv + (((row * cells + origin) * 3 + 1) * heads + head) * WIDTH
    store(target, place, exists, 3 * heads * WIDTH, d_k * SCALE, WIDTH, CHANNELS)
    store(target + heads * WIDTH, place, exists, 3 * heads * WIDTH, d_v, WIDTH, CHANNELS)


@triton.jit(do_not_specialize=VARYING)
def summary_gradients(
    grad: tl.tensor,
    log_sums: tl.tensor,
    deltas: tl.tensor,
    qkv: tl.tensor,
    far_k: tl.tensor,
    far_v: tl.tensor,
    far_mask: tl.tensor,
    chunks: tl.tensor,
    d_far: tl.tensor,
    row_stride: tl.tensor,
    cell_stride: tl.tensor,
    head_stride: tl.tensor,
    far_mask_stride: tl.tensor,
    cells: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    chunk: tl.tensor,
    span: tl.tensor,
    LATER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Gradients of COUNT summaries, from `span` queries: a part of a sum.

    d_far: (parts, 2, batch, heads, count, WIDTH), of keys and of values.
    """
    tiles = tl.cdiv(count, COUNT)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    row, head = pair // heads, pair % heads
    first = tl.program_id(1) * span
    number = tl.program_id(0) % tiles * COUNT + tl.arange(0, COUNT)
    exists = number < count
    q_source = qkv + row * row_stride + head * head_stride
    g_source = grad + (row * cells * heads + head) * WIDTH
    f = load(far_k + pair * count * WIDTH, number, exists, WIDTH, WIDTH, CHANNELS).to(qkv.dtype.element_ty)
    u = load(far_v + pair * count * WIDTH, number, exists, WIDTH, WIDTH, CHANNELS).to(qkv.dtype.element_ty)
    if far_mask is not None:
        far_mask += row * far_mask_stride
    exist = kept(far_mask, number, exists)
    d_f = tl.zeros((COUNT, CHANNELS), tl.float32)
    d_u = tl.zeros((COUNT, CHANNELS), tl.float32)
    for start in range(first, tl.minimum(first + span, cells), QUERIES):
        position = start + tl.arange(0, QUERIES)
        real = position < cells
        limit = tl.where(real, summaries_seen(position, count, chunk, chunks, row, LATER), 0)
        if tl.max(limit, 0) > tl.program_id(0) % tiles * COUNT:  # else nobody here sees any of them
            place = position.to(tl.int64)
            q = load(q_source, place, real, cell_stride, WIDTH, CHANNELS)
            g = load(g_source, place, real, heads * WIDTH, WIDTH, CHANNELS)
            log_sum = tl.load(log_sums + pair * cells + position, mask=real, other=float("inf"))
            delta = tl.load(deltas + pair * cells + position, mask=real, other=0.0)
            seen = exist[:, None] & (number[:, None] < limit[None, :])
            logits = window_logits(dot(f, tl.trans(q), PRECISION), position, number, seen, None, 0, 0, 0, False, SCALE)
            probs = tl.exp2(logits - log_sum[None, :])
            d_u += dot(probs.to(g.dtype), g, PRECISION)
            d_logits = probs * (dot(u, tl.trans(g), PRECISION) - delta[None, :])
            d_f += dot(d_logits.to(q.dtype), q, PRECISION)
    pairs = tl.num_programs(0).to(tl.int64) // tiles
    target = d_far + ((tl.program_id(1) * 2 * pairs) + pair) * count * WIDTH
    store(target, number, exists, WIDTH, d_f * SCALE, WIDTH, CHANNELS)
    store(target + pairs * count * WIDTH, number, exists, WIDTH, d_u, WIDTH, CHANNELS)


@triton.jit(do_not_specialize=[*VARYING, "all_windows"])
def bias_gradients(
    grad: tl.tensor,
    log_sums: tl.tensor,
    deltas: tl.tensor,
    qkv: tl.tensor,
    bias: tl.tensor,
    mask: tl.tensor,
    d_bias: tl.tensor,
    row_stride: tl.tensor,
    cell_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    bias_head: tl.tensor,
    bias_query: tl.tensor,
    bias_key: tl.tensor,
    mask_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    windows: tl.tensor,
    all_windows: tl.tensor,
    heads: tl.tensor,
    span: tl.tensor,
    WINDOW: tl.constexpr,
    BACK: tl.constexpr,
    SIDE: tl.constexpr,
    AXES: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The gradient of a tile of the bias, from `span` of all windows of the batch: a part of a sum.

    d_bias: (parts, heads, queries, keys) of a window.
    """
    CELLS: tl.constexpr = WINDOW**AXES
    ALL_KEYS: tl.constexpr = SIDE**AXES
    TILES: tl.constexpr = (ALL_KEYS + KEYS - 1) // KEYS
    head = tl.program_id(1)
    query = tl.program_id(0) // TILES * QUERIES + tl.arange(0, QUERIES)
    start = tl.program_id(0) % TILES * KEYS
    first = tl.program_id(2) * span
    cells = rows * columns
    bias += head * bias_head
    total = tl.zeros((QUERIES, KEYS), tl.float32)
    for window in range(first, tl.minimum(first + span, all_windows)):
        row = tl.cast(window // windows, tl.int64)
        top, left = corner(window % windows, columns, WINDOW, AXES)
        origin = top.to(tl.int64) * columns + left
        place, exists = places(query, top, left, rows, columns, 0, WINDOW, AXES)
        source = qkv + row * row_stride + origin * cell_stride + head * head_stride
        q = load(source, place, exists, cell_stride, WIDTH, CHANNELS)
        from_origin = ((row * cells + origin) * heads + head) * WIDTH
        g = load(grad + from_origin, place, exists, heads * WIDTH, WIDTH, CHANNELS)
        number = (row * heads + head) * cells + origin + place
        log_sum = tl.load(log_sums + number, mask=exists, other=float("inf"))
        delta = tl.load(deltas + number, mask=exists, other=0.0)
        own_mask = mask
        if mask is not None:
            own_mask = mask + row * mask_stride + origin
        _, v, logits = window_tile(
            q, query, exists, start, source, cell_stride, part_stride, bias, bias_query, bias_key, own_mask,
            top, left, rows, columns, BACK, SIDE, AXES, CAUSAL, SCALE, WIDTH, CHANNELS, KEYS, PRECISION,
        )  # fmt: skip
        total += tl.exp2(logits - log_sum[:, None]) * (dot(g, tl.trans(v), PRECISION) - delta[:, None])
    key = start + tl.arange(0, KEYS)
    target = d_bias + (tl.program_id(2) * heads + head).to(tl.int64) * CELLS * ALL_KEYS
    written = (query < CELLS)[:, None] & (key < ALL_KEYS)[None, :]
    tl.store(target + query[:, None] * ALL_KEYS + key[None, :], total, mask=written)
