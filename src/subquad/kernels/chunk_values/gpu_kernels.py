"""The Triton kernels of values and means of chunks: `gpu.py` launches them. A program has one chunk and one head."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
VARYING = ["time", "chunks", "size", "mask_stride", "divisor_stride"]
"""Sizes that change from batch to batch: compiling anew for those divisible by 16 would not pay."""


@triton.jit
def _members(
    sizes: tl.tensor, size: tl.tensor, row: tl.tensor, chunk: tl.tensor, time: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The first position of a chunk, and the one after its last."""
    if sizes is not None:
        size = tl.load(sizes + row).to(tl.int32)
    first = tl.minimum(chunk * size, time)
    return first, tl.minimum(first + size, time)


@triton.jit
def _load(
    source: tl.tensor, position: tl.tensor, kept: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Vectors (positions, CHANNELS) in float32, zeros where `kept` is False."""
    channel = tl.arange(0, CHANNELS)
    place = position.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(source + place, mask=kept[:, None] & (channel < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _kept(mask: tl.tensor, position: tl.tensor, end: tl.tensor) -> tl.tensor:
    kept = position < end
    if mask is not None:
        kept = kept & (tl.load(mask + position, mask=kept, other=0) != 0)
    return kept


@triton.jit
def _logits(k: tl.tensor, w: tl.tensor, kept: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """To the base 2; -inf where there is nothing."""
    logits = tl.sum(k * (w[None, :] - k * 0.5), 1) * (SCALE * LOG2_E)
    return tl.where(kept, logits, float("-inf"))


@triton.jit(do_not_specialize=VARYING)
def average(
    qkv: tl.tensor,
    w: tl.tensor,
    mask: tl.tensor,
    sizes: tl.tensor,
    u: tl.tensor,
    log_sums: tl.tensor,
    row_stride: tl.tensor,
    time_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    mask_stride: tl.tensor,
    time: tl.tensor,
    chunks: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIME: tl.constexpr,
) -> None:
    """u of one chunk, and the logarithm of its sum; +inf, which makes all weights zero, for one without positions."""
    row, head = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(1)
    first, end = _members(sizes, size, row, tl.program_id(0) % chunks, time)
    number = (row * heads + head) * chunks + tl.program_id(0) % chunks
    channel = tl.arange(0, CHANNELS)
    query = tl.load(w + number * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    source = qkv + row * row_stride + part_stride + head * head_stride
    if mask is not None:
        mask += row * mask_stride
    largest, total = float("-inf"), 0.0
    mixed = tl.zeros((CHANNELS,), tl.float32)
    for start in range(first, end, TIME):
        position = start + tl.arange(0, TIME)
        kept = _kept(mask, position, end)
        k = _load(source, position, kept, time_stride, WIDTH, CHANNELS)
        v = _load(source + part_stride, position, kept, time_stride, WIDTH, CHANNELS)
        logits = _logits(k, query, kept, SCALE)
        new = tl.maximum(largest, tl.max(logits, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # as long as nothing is there
        weights, shrink = tl.exp2(logits - finite), tl.exp2(largest - finite)
        mixed = mixed * shrink + tl.sum(weights[:, None] * v, 0)
        largest, total = new, total * shrink + tl.sum(weights, 0)
    some = total > 0
    total = tl.where(some, total, 1.0)
    tl.store(u + number * WIDTH + channel, (mixed / total).to(u.dtype.element_ty), mask=channel < WIDTH)
    tl.store(log_sums + number, tl.where(some, largest + tl.log2(total), float("inf")))


@triton.jit(do_not_specialize=VARYING)
def add_gradients(
    qkv: tl.tensor,
    w: tl.tensor,
    mask: tl.tensor,
    sizes: tl.tensor,
    u: tl.tensor,
    log_sums: tl.tensor,
    grad: tl.tensor,
    d_qkv: tl.tensor,
    d_w: tl.tensor,
    row_stride: tl.tensor,
    time_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    mask_stride: tl.tensor,
    time: tl.tensor,
    chunks: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIME: tl.constexpr,
) -> None:
    """With g the gradient of u and p the weights, d logit_j = p_j g . (v_j - u), d v_j = p_j g and

    d k_j = s d logit_j (w - k_j),    d w = s sum_j d logit_j k_j.
    """
    row, head = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(1)
    first, end = _members(sizes, size, row, tl.program_id(0) % chunks, time)
    number = (row * heads + head) * chunks + tl.program_id(0) % chunks
    channel = tl.arange(0, CHANNELS)
    in_head = channel < WIDTH
    query = tl.load(w + number * WIDTH + channel, mask=in_head, other=0.0).to(tl.float32)
    g = tl.load(grad + number * WIDTH + channel, mask=in_head, other=0.0).to(tl.float32)
    delta = tl.sum(tl.load(u + number * WIDTH + channel, mask=in_head, other=0.0).to(tl.float32) * g, 0)
    log_sum = tl.load(log_sums + number)
    source = qkv + row * row_stride + part_stride + head * head_stride
    target = d_qkv + ((row * time * 3 + 1) * heads + head) * WIDTH
    if mask is not None:
        mask += row * mask_stride
    d_query = tl.zeros((CHANNELS,), tl.float32)
    for start in range(first, end, TIME):
        position = start + tl.arange(0, TIME)
        kept = _kept(mask, position, end)
        k = _load(source, position, kept, time_stride, WIDTH, CHANNELS)
        v = _load(source + part_stride, position, kept, time_stride, WIDTH, CHANNELS)
        weights = tl.exp2(_logits(k, query, kept, SCALE) - log_sum)
        d_logits = weights * (tl.sum(v * g[None, :], 1) - delta) * SCALE
        d_query += tl.sum(d_logits[:, None] * k, 0)
        _add(target, position, kept, heads * 3, d_logits[:, None] * (query[None, :] - k), WIDTH, CHANNELS)
        _add(target + heads * WIDTH, position, kept, heads * 3, weights[:, None] * g[None, :], WIDTH, CHANNELS)
    tl.store(d_w + number * WIDTH + channel, d_query.to(d_w.dtype.element_ty), mask=in_head)


@triton.jit
def _add(
    target: tl.tensor, position: tl.tensor, kept: tl.tensor, stride: tl.tensor, values: tl.tensor,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Adds vectors in float32 to those of a target, of which `stride` lie between positions."""
    channel = tl.arange(0, CHANNELS)
    place = target + position.to(tl.int64)[:, None] * (stride * WIDTH) + channel[None, :]
    mask = kept[:, None] & (channel < WIDTH)[None, :]
    total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + values
    tl.store(place, total.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def means_of_members(
    qkv: tl.tensor,
    mask: tl.tensor,
    sizes: tl.tensor,
    divisors: tl.tensor,
    q_means: tl.tensor,
    k_means: tl.tensor,
    row_stride: tl.tensor,
    time_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    mask_stride: tl.tensor,
    divisor_stride: tl.tensor,
    time: tl.tensor,
    chunks: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIME: tl.constexpr,
) -> None:
    """The sums of a chunk's queries and of its keys, over the chunk's divisor."""
    row, head = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(1)
    first, end = _members(sizes, size, row, tl.program_id(0) % chunks, time)
    number = (row * heads + head) * chunks + tl.program_id(0) % chunks
    source = qkv + row * row_stride + head * head_stride
    if mask is not None:
        mask += row * mask_stride
    queries = tl.zeros((CHANNELS,), tl.float32)
    keys = tl.zeros((CHANNELS,), tl.float32)
    for start in range(first, end, TIME):
        position = start + tl.arange(0, TIME)
        kept = _kept(mask, position, end)
        queries += tl.sum(_load(source, position, kept, time_stride, WIDTH, CHANNELS), 0)
        keys += tl.sum(_load(source + part_stride, position, kept, time_stride, WIDTH, CHANNELS), 0)
    channel = tl.arange(0, CHANNELS)
    divisor = tl.load(divisors + row * divisor_stride + tl.program_id(0) % chunks).to(tl.float32)
    queries, keys = (queries / divisor).to(q_means.dtype.element_ty), (keys / divisor).to(k_means.dtype.element_ty)
    tl.store(q_means + number * WIDTH + channel, queries, mask=channel < WIDTH)
    tl.store(k_means + number * WIDTH + channel, keys, mask=channel < WIDTH)


@triton.jit(do_not_specialize=VARYING)
def add_to_members(
    qkv: tl.tensor,
    mask: tl.tensor,
    sizes: tl.tensor,
    divisors: tl.tensor,
    q_grad: tl.tensor,
    k_grad: tl.tensor,
    mask_stride: tl.tensor,
    divisor_stride: tl.tensor,
    time: tl.tensor,
    chunks: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIME: tl.constexpr,
) -> None:
    """The transpose of `means_of_members`: adds two vectors of a chunk to the queries and keys of its positions."""
    row, head = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(1)
    first, end = _members(sizes, size, row, tl.program_id(0) % chunks, time)
    number = (row * heads + head) * chunks + tl.program_id(0) % chunks
    channel = tl.arange(0, CHANNELS)
    divisor = tl.load(divisors + row * divisor_stride + tl.program_id(0) % chunks).to(tl.float32)
    for_query = tl.load(q_grad + number * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32) / divisor
    for_key = tl.load(k_grad + number * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32) / divisor
    target = qkv + (row * time * 3 * heads + head) * WIDTH
    if mask is not None:
        mask += row * mask_stride
    for start in range(first, end, TIME):
        position = start + tl.arange(0, TIME)
        kept = _kept(mask, position, end)
        _add(target, position, kept, heads * 3, for_query[None, :], WIDTH, CHANNELS)
        _add(target + heads * WIDTH, position, kept, heads * 3, for_key[None, :], WIDTH, CHANNELS)
