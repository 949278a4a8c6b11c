"""The Triton kernels of window attention: `gpu.py` launches them, `gpu_tiles.py` has what they share.

A program works on one head: on some queries of a window, against tiles of what they see; or on some keys or summaries,
against tiles of the queries that see them. Each number is written by one program, in a fixed order of sums.
"""

import triton
import triton.language as tl

from subquad.kernels.triton_tools import dot
from subquad.kernels.window_attention.gpu_tiles import (
    corner,
    load,
    places,
    store,
    summaries_seen,
    summary_tile,
    window_tile,
)

VARYING = ["rows", "columns", "windows", "count", "chunk", "mask_stride", "far_mask_stride", "span"]
"""Sizes that change from batch to batch: compiling anew for those divisible by 16 would not pay."""


@triton.jit(do_not_specialize=VARYING)
def attend(
    qkv: tl.tensor,
    bias: tl.tensor,
    mask: tl.tensor,
    far_k: tl.tensor,
    far_v: tl.tensor,
    far_mask: tl.tensor,
    chunks: tl.tensor,
    y: tl.tensor,
    log_sums: tl.tensor,
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
    """y of QUERIES queries by a softmax that goes from tile to tile, and the logarithms of its sums.

    y: (batch, cells, heads, WIDTH); log_sums: (batch, heads, cells), to the base 2; far_k, far_v: (batch, heads, count,
    WIDTH) of summaries.
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
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, CHANNELS), tl.float32)
    last_key = tl.minimum(first + QUERIES + BACK, SIDE) if CAUSAL else SIDE**AXES
    for start in range(0, last_key, KEYS):
        _, v, logits = window_tile(
            q, query, exists, start, source, cell_stride, part_stride, bias, bias_query, bias_key, mask,
            top, left, rows, columns, BACK, SIDE, AXES, CAUSAL, SCALE, WIDTH, CHANNELS, KEYS, PRECISION,
        )  # fmt: skip
        largest, total, mixed = _add_to_softmax(logits, v, largest, total, mixed, PRECISION)
    if far_k is not None:
        limit = tl.where(exists, summaries_seen(left + query, count, chunk, chunks, row, LATER), 0)
        if far_mask is not None:
            far_mask += row * far_mask_stride
        for start in range(0, tl.max(limit, 0), COUNT):
            _, u, logits = summary_tile(
                q, limit, start, far_k + pair * count * WIDTH, far_v + pair * count * WIDTH, far_mask, count,
                SCALE, WIDTH, CHANNELS, COUNT, PRECISION,
            )  # fmt: skip
            largest, total, mixed = _add_to_softmax(logits, u, largest, total, mixed, PRECISION)
    some = total > 0
    total = tl.where(some, total, 1.0)
    target = y + ((row * cells + origin) * heads + head) * WIDTH
    store(target, place, exists, heads * WIDTH, mixed / total[:, None], WIDTH, CHANNELS)
    # of a query that sees nothing: it makes all of its probabilities zero in the backward pass
    log_sum = tl.where(some, largest + tl.log2(total), float("inf"))
    tl.store(log_sums + pair * cells + origin + place, log_sum, mask=exists)


@triton.jit
def _add_to_softmax(
    logits: tl.tensor,
    values: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple:
    """The softmax so far (largest logit, sum of weights, sum of weighted values) with more logits and values."""
    new = tl.maximum(largest, tl.max(logits, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)  # as long as nothing was seen
    weights = tl.exp2(logits - finite[:, None])
    shrink = tl.exp2(largest - finite)
    mixed = mixed * shrink[:, None] + dot(weights.to(values.dtype), values, PRECISION)
    return new, total * shrink + tl.sum(weights, 1), mixed
