"""The causal scan of linear attention as Triton kernels: see `__init__.py`.

    y_i = q_i^T S_i        S_i = sum_{j <= i} exp(l_j - l_i) k_j [v_j, 1]^T + exp(l_before - l_i) before

The sequence is cut into chunks. One kernel sums the keys and values of every chunk, another carries these sums from
chunk to chunk (`chunks.py`), and a third forms the pairs within a chunk and adds what was carried there. With the sums
over the future

    G_j = sum_{i >= j} exp(l_j - l_i) q_i g_i^T + exp(l_j - l_last) g_last

where g and g_last are the gradients of y and of the last S, the gradients of q_i, k_j and v_j are S_i g_i, G_j [v_j, 1]
and G_j^T k_j: the same kernels serve them, run backwards for G. Log scales never fall, so every exponent is at most 0.

The channel of ones takes no place in a tile: where it is a factor, products get its share as a vector. Products are
taken in the precision of v, summed in float32; no number is written by two programs, so equal inputs give equal bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.scan import reference
from subquad.kernels.scan.chunks import carry_future, carry_past
from subquad.kernels.triton_tools import dot, dot_precision, factors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 64  # positions of a chunk, and most of a width that is worked on at once
EXACT_TILE = 32  # the same where float32 is multiplied by ordinary instructions, which keep all factors in registers
SMALLEST = 16  # the smallest side that tl.dot takes


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, channels + 1) and the last S; see the public function. time >= 1."""
    y, last = _scan(*(_by_rows(t) for t in (q, k, v)), log_scale.float(), before, log_scale_before.float())
    return y, last


@torch.library.custom_op("subquad::causal_scan", mutates_args=())
def _scan(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    states, reached, last = _past(k, v, log_scale, before, log_scale_before)
    y = q.new_empty(*v.shape[:3], v.shape[3] + 1)
    _mix(q, k, v, log_scale, reached, states, y, v.dtype, column_of_ones=True)
    return y, last.view(before.shape).to(before.dtype)


@_scan.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    q, _, v, _, before, _ = inputs
    return q.new_empty(*v.shape[:3], v.shape[3] + 1), before.new_empty(before.shape)


@torch.library.custom_op("subquad::causal_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_scale: Tensor,
    before: Tensor,
    log_scale_before: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and before. What chunks start from is summed anew rather than kept since the forward."""
    grad = _by_rows(grad)
    states, reached, _ = _past(k, v, log_scale, before, log_scale_before)
    sums, _ = _sum_chunks(q, grad, log_scale, reached, v.dtype, future=True)
    ends, grad_before = carry_future(sums, reached, grad_last.float().reshape(sums.shape[0], -1))
    grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    scales = log_scale, reached
    _mix(grad, v, k, *scales, states, grad_q, v.dtype, transposed=True, ones="right")
    _mix(v, grad, q, *scales, ends, grad_k, v.dtype, future=True, transposed=True, ones="left")
    _mix(k, q, grad, *scales, ends, grad_v, v.dtype, future=True)
    return grad_q, grad_k, grad_v, grad_before.view(before.shape).to(before.dtype)


@_scan_backward.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, q, k, v, _, before, _ = inputs
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), before.new_empty(before.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
    if tracing.differentiates_backward():
        return tuple(tracing.gradients_of(reference.causal_sums, ctx.saved_tensors, grad, grad_last))
    grad_q, grad_k, grad_v, grad_before = _scan_backward(grad, grad_last, *ctx.saved_tensors)
    return grad_q, grad_k, grad_v, None, grad_before, None


_scan.register_autograd(_gradients, setup_context=_keep)


# ---------------------------------------------------------------------- launches


def _by_rows(t: Tensor) -> Tensor:
    """t (batch, heads, time, width) of any strides whose channels lie side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _past(
    k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What each chunk starts from (pairs, chunks, rows, channels + 1), log scales at its edges, and the last S."""
    sums, own = _sum_chunks(k, v, log_scale, None, v.dtype, future=False)
    first = before.float().reshape(sums.shape[0], -1)
    (states, last), reached = carry_past(sums, own, first, log_scale_before.reshape(-1))
    return states, reached, last


def _sum_chunks(
    a: Tensor, b: Tensor, log_scale: Tensor, reached: Tensor | None, dtype: torch.dtype, future: bool
) -> tuple[Tensor, Tensor]:
    """sum_i exp(l_i - l_end) a_i [b_i, 1]^T of every chunk: (pairs, chunks, rows * (columns + 1)); and its l_end.

    `future`: sum_i exp(l_start - l_i) a_i b_i^T, whose b has all columns, and no l_end.
    """
    (batch, heads, time, rows), columns = a.shape, b.shape[-1] - future
    pairs, chunk = batch * heads, _tile(time, dtype)
    chunks = triton.cdiv(time, chunk)
    sums = a.new_empty(pairs, chunks, rows * (columns + 1), dtype=torch.float32)
    own = a.new_empty(pairs, chunks, dtype=torch.float32)
    if sums.numel():
        tile_rows, tile_columns = _tile(rows, dtype), _tile(columns, dtype)
        grid = pairs * chunks, triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns)
        with torch.cuda.device_of(a):
            _sum_chunks_kernel[grid](
                a, b, log_scale.contiguous(), reached, sums, own, heads, time, rows, columns,
                *a.stride()[:3], *b.stride()[:3],
                FUTURE=future, CHUNK=chunk, ROWS=tile_rows, COLUMNS=tile_columns,
                **factors(dtype), num_warps=8, num_stages=1,
            )  # fmt: skip
    return sums, own


def _mix(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    log_scale: Tensor,
    reached: Tensor,
    carried: Tensor,
    out: Tensor,
    dtype: torch.dtype,
    *,
    future: bool = False,
    transposed: bool = False,
    ones: str = "",
    column_of_ones: bool = False,
) -> None:
    """out_i = sum_j exp(-|l_i - l_j|) (a_i . b_j) c_j over past j <= i (`future`: j >= i).

    a, b: (batch, heads, time, inner); c, out: (batch, heads, time, columns). carried (pairs, chunks, rows * channels)
    stands for the j of other chunks; `transposed`: its rows belong to the columns of c. ones: which of a and b,
    "left" or "right", is followed by a channel of ones where the other has a channel more. column_of_ones: c is
    followed by one, and out has a channel more.
    """
    batch, heads, time, _ = a.shape
    inner, columns, chunk = min(a.shape[-1], b.shape[-1]), out.shape[-1] - column_of_ones, _tile(time, dtype)
    if out.numel():
        tile_inner, tile_columns = min(EXACT_TILE, _tile(inner, dtype)), _tile(columns, dtype)
        grid = batch * heads * triton.cdiv(time, chunk), triton.cdiv(columns, tile_columns)
        row = carried.shape[-1] // (columns if transposed else inner)
        with torch.cuda.device_of(a):
            _mix_kernel[grid](
                a, b, c, log_scale.contiguous(), reached, carried, out, heads, time, inner, columns,
                *a.stride()[:3], *b.stride()[:3], *c.stride()[:3], *out.stride()[:3],
                carried.shape[-1], 1 if transposed else row, row if transposed else 1,
                FUTURE=future, ONES=ones, COLUMN_OF_ONES=column_of_ones,
                CHUNK=chunk, INNER=tile_inner, COLUMNS=tile_columns, **factors(dtype),
                num_warps=8 if _is_exact(dtype) else 4, num_stages=1,
            )  # fmt: skip


def _tile(size: int, dtype: torch.dtype) -> int:
    """How much of a width, or of the positions, is worked on at once."""
    return min(EXACT_TILE if _is_exact(dtype) else TILE, max(SMALLEST, triton.next_power_of_2(size)))


def _is_exact(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and dot_precision() == "ieee"


# ---------------------------------------------------------------------- kernels


# Lengths change from call to call: compiling anew for those divisible by 16 would not pay.
@triton.jit(do_not_specialize=["time"])
def _sum_chunks_kernel(
    a: tl.tensor,
    b: tl.tensor,
    log_scale: tl.tensor,
    reached: tl.tensor | None,
    sums: tl.tensor,
    own: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    a_batch: tl.tensor,
    a_head: tl.tensor,
    a_time: tl.tensor,
    b_batch: tl.tensor,
    b_head: tl.tensor,
    b_time: tl.tensor,
    FUTURE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One chunk and a tile of its sums."""
    chunks = tl.cdiv(time, CHUNK)
    block = tl.program_id(0).to(tl.int64)
    pair, n = block // chunks, block % chunks
    batch, head, first = pair // heads, pair % heads, n * CHUNK
    index = tl.arange(0, CHUNK)
    left_over = (time - first).to(tl.int32)
    exists = index < left_over
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    log_scale += pair * time + first
    log_scales = tl.load(log_scale + tl.minimum(index, left_over - 1))
    if FUTURE:
        scale = tl.exp(tl.load(reached + pair * (chunks + 1) + n) - log_scales)
    else:
        end = tl.load(log_scale + tl.minimum(CHUNK, left_over) - 1)
        tl.store(own + block, end)
        scale = tl.exp(log_scales - end)
    a += batch * a_batch + head * a_head + first * a_time
    b += batch * b_batch + head * b_head + first * b_time
    in_rows, in_columns = row < rows, column < columns
    left = tl.load(a + index[:, None] * a_time + row[None, :], mask=exists[:, None] & in_rows[None, :], other=0.0)
    left = left.to(tl.float32) * scale[:, None]
    right = tl.load(
        b + index[:, None] * b_time + column[None, :], mask=exists[:, None] & in_columns[None, :], other=0.0
    )
    product = dot(tl.trans(left.to(FACTOR)), right.to(FACTOR), PRECISION)
    sums += block * rows * (columns + 1)
    place = row * (columns + 1)
    tl.store(sums + place[:, None] + column[None, :], product, mask=in_rows[:, None] & in_columns[None, :])
    if FUTURE:
        left *= tl.load(b + index * b_time + columns, mask=exists, other=0.0).to(tl.float32)[:, None]
    tl.store(sums + place + columns, tl.sum(left, 0), mask=in_rows & (tl.program_id(2) == 0))


@triton.jit(do_not_specialize=["time"])
def _mix_kernel(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    log_scale: tl.tensor,
    reached: tl.tensor,
    carried: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    time: tl.tensor,
    inner: tl.tensor,
    columns: tl.tensor,
    a_batch: tl.tensor,
    a_head: tl.tensor,
    a_time: tl.tensor,
    b_batch: tl.tensor,
    b_head: tl.tensor,
    b_time: tl.tensor,
    c_batch: tl.tensor,
    c_head: tl.tensor,
    c_time: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_time: tl.tensor,
    carried_block: tl.tensor,
    carried_inner: tl.tensor,
    carried_column: tl.tensor,
    FUTURE: tl.constexpr,
    ONES: tl.constexpr,
    COLUMN_OF_ONES: tl.constexpr,
    CHUNK: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One chunk, COLUMNS columns: out = (a b^T * decays, masked) c + (a @ carried) * decay since the chunk's edge."""
    chunks = tl.cdiv(time, CHUNK)
    block = tl.program_id(0).to(tl.int64)
    pair, n = block // chunks, block % chunks
    batch, head, begin = pair // heads, pair % heads, n * CHUNK
    index = tl.arange(0, CHUNK)
    left_over = (time - begin).to(tl.int32)
    exists = index < left_over
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < columns
    a += batch * a_batch + head * a_head + begin * a_time
    b += batch * b_batch + head * b_head + begin * b_time
    c += batch * c_batch + head * c_head + begin * c_time
    out += batch * out_batch + head * out_head + begin * out_time
    carried += block * carried_block
    far = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    far_ones = tl.zeros((CHUNK,), dtype=tl.float32)
    for first in range(0, inner, INNER):
        entry = first + tl.arange(0, INNER)
        in_inner = entry < inner
        mask = exists[:, None] & in_inner[None, :]
        left = tl.load(a + index[:, None] * a_time + entry[None, :], mask=mask, other=0.0)
        right = tl.load(b + index[:, None] * b_time + entry[None, :], mask=mask, other=0.0)
        pairs += dot(left.to(FACTOR), tl.trans(right.to(FACTOR)), PRECISION)
        place = entry[:, None] * carried_inner + column[None, :] * carried_column
        state = tl.load(carried + place, mask=in_inner[:, None] & in_columns[None, :], other=0.0)
        far += dot(left.to(FACTOR), state.to(FACTOR), PRECISION)
        if COLUMN_OF_ONES:
            beside = tl.load(carried + entry * carried_inner + columns * carried_column, mask=in_inner, other=0.0)
            far_ones += tl.sum(left.to(tl.float32) * beside[None, :], 1)
    if ONES != "":
        beside = tl.load(carried + inner * carried_inner + column * carried_column, mask=in_columns, other=0.0)
        if ONES == "left":
            pairs += tl.load(b + index * b_time + inner, mask=exists, other=0.0).to(tl.float32)[None, :]
            far += beside[None, :]
        else:
            weight = tl.load(a + index * a_time + inner, mask=exists, other=0.0).to(tl.float32)[:, None]
            pairs += weight
            far += weight * beside[None, :]
    log_scales = tl.load(log_scale + pair * time + begin + tl.minimum(index, left_over - 1))
    edge = reached + pair * (chunks + 1) + n
    if FUTURE:
        seen = index[:, None] <= index[None, :]
        differences = log_scales[:, None] - log_scales[None, :]
        since_edge = tl.exp(log_scales - tl.load(edge + 1))
    else:
        seen = index[:, None] >= index[None, :]
        differences = log_scales[None, :] - log_scales[:, None]
        since_edge = tl.exp(tl.load(edge) - log_scales)
    # pairs out of sight have positive exponents, which might be infinite
    pairs = tl.where(seen & exists[None, :], pairs * tl.exp(tl.minimum(differences, 0.0)), 0.0)
    mask = exists[:, None] & in_columns[None, :]
    values = tl.load(c + index[:, None] * c_time + column[None, :], mask=mask, other=0.0)
    result = far * since_edge[:, None] + dot(pairs.to(FACTOR), values.to(FACTOR), PRECISION)
    place = index[:, None] * out_time + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    if COLUMN_OF_ONES:
        ones = far_ones * since_edge + tl.sum(pairs, 1)
        tl.store(out + index * out_time + columns, ones.to(out.dtype.element_ty), mask=exists & (tl.program_id(1) == 0))
