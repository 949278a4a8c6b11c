"""The causal scan of linear attention as Triton kernels: see `__init__.py`.

    y_i = q_i^T S_i        S_i = sum_{j <= i} exp(l_j - l_i) k_j v_j^T + exp(l_before - l_i) before

The sequence is cut into chunks. One kernel carries sums from chunk to chunk and keeps what each chunk starts from, a
second forms the pairs within a chunk and adds what was carried there. With the sums over the future

    G_j = sum_{i >= j} exp(l_j - l_i) q_i g_i^T + exp(l_j - l_last) g_last

where g and g_last are the gradients of y and of the last S, the gradients of q_i, k_j and v_j are S_i g_i, G_j v_j and
G_j^T k_j: the same two kernels serve them, run backwards for G. Log scales never fall, so every exponent is at most 0.

No number is written by two programs: equal inputs give equal bits. Products are taken in full float32 (no TF32), or
float64. With TRITON_INTERPRET=1 in the environment before triton is imported, the kernels run on CPU tensors.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.scan import reference

CHUNK = 64
TILE = 32  # widths are worked on in pieces of this size
SMALLEST = 16  # the smallest side that tl.dot takes


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, channels) and the last S (batch, heads, width, channels), by the equation above.

    q, k: (batch, heads, time, width); v: (batch, heads, time, channels); log_scale: l (batch, heads, time),
    never falling and never below log_scale_before (batch, heads), both constant for the gradient; before: like S.
    time >= 1.
    """
    precision = torch.promote_types(q.dtype, torch.float32)
    y, last = _scan(*(t.to(precision) for t in (q, k, v, log_scale, before, log_scale_before)))
    return y.to(q.dtype), last.to(before.dtype)


@torch.library.custom_op("subquad::causal_scan", mutates_args=())
def _scan(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, log_scale, before, log_scale_before = (
        t.contiguous() for t in (q, k, v, log_scale, before, log_scale_before)
    )
    starts, last = _carried(k, v, log_scale, log_scale_before, before, future=False)
    return _mixed(q, k, v, log_scale, log_scale_before, starts, future=False), last


@_scan.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    _, _, v, _, before, _ = inputs
    return v.new_empty(v.shape), before.new_empty(before.shape)


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
    grad, grad_last, q, k, v = (t.contiguous() for t in (grad, grad_last, q, k, v))
    log_scale, before, log_scale_before = (t.contiguous() for t in (log_scale, before, log_scale_before))
    starts, _ = _carried(k, v, log_scale, log_scale_before, before, future=False)
    ends, grad_before = _carried(q, grad, log_scale, log_scale_before, grad_last, future=True)
    grad_q = _mixed(grad, v, k, log_scale, log_scale_before, starts.transpose(-1, -2), future=False)
    grad_k = _mixed(v, grad, q, log_scale, log_scale_before, ends.transpose(-1, -2), future=True)
    grad_v = _mixed(k, q, grad, log_scale, log_scale_before, ends, future=True)
    return grad_q, grad_k, grad_v, grad_before


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


def _carried(
    a: Tensor, b: Tensor, log_scale: Tensor, log_scale_before: Tensor, first: Tensor, future: bool
) -> tuple[Tensor, Tensor]:
    """What each chunk gets from those before it (`future`: after it), and what is left once all are summed.

    a: (batch, heads, time, rows); b: (batch, heads, time, columns); first: (batch, heads, rows, columns), what the
    first (last) chunk gets. Returns (batch, heads, chunks, rows, columns) and (batch, heads, rows, columns).
    """
    batch, heads, time, rows = a.shape
    columns, chunk = b.shape[-1], _chunk(time)
    carried = a.new_empty(batch, heads, triton.cdiv(time, chunk), rows, columns)
    total = torch.empty_like(first)
    if total.numel():
        grid = batch * heads, triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
        with torch.cuda.device_of(a):
            _carry[grid](
                a, b, log_scale, log_scale_before, first, carried, total, time, rows, columns,
                FUTURE=future, CHUNK=chunk, TILE=TILE,
            )  # fmt: skip
    return carried, total


def _mixed(
    a: Tensor, b: Tensor, c: Tensor, log_scale: Tensor, log_scale_before: Tensor, carried: Tensor, future: bool
) -> Tensor:
    """out_i = sum_j exp(-|l_i - l_j|) (a_i . b_j) c_j over past j <= i (`future`: j >= i).

    a, b: (batch, heads, time, inner); c and the result: (batch, heads, time, columns); carried: (batch, heads, chunks,
    inner, columns) of any strides, from `_carried` or its transpose, stands for the j of other chunks.
    """
    batch, heads, time, inner = a.shape
    columns, chunk = c.shape[-1], _chunk(time)
    out = torch.empty_like(c)
    if out.numel():
        grid = batch * heads * triton.cdiv(time, chunk), triton.cdiv(columns, TILE)
        with torch.cuda.device_of(a):
            _mix[grid](
                a, b, c, log_scale, log_scale_before, carried, out, time, inner, columns,
                carried.stride(3), carried.stride(4), FUTURE=future, CHUNK=chunk, TILE=TILE,
            )  # fmt: skip
    return out


def _chunk(time: int) -> int:
    return min(CHUNK, max(SMALLEST, triton.next_power_of_2(time)))


# ---------------------------------------------------------------------- kernels


@triton.jit
def _chunk_log_scales(
    log_scale: tl.tensor, log_scale_before: tl.tensor, n: tl.tensor, time: tl.tensor, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """l of chunk n (CHUNK,), the one reached before it, and its last. Beyond the end the last one repeats."""
    position = n * CHUNK + tl.arange(0, CHUNK)
    log_scales = tl.load(log_scale + tl.minimum(position, time - 1))
    start = tl.load(tl.where(n > 0, log_scale + n * CHUNK - 1, log_scale_before))
    end = tl.load(log_scale + tl.minimum(n * CHUNK + CHUNK, time) - 1)
    return log_scales, start, end


@triton.jit(do_not_specialize=["time"])
def _carry(
    a: tl.tensor,
    b: tl.tensor,
    log_scale: tl.tensor,
    log_scale_before: tl.tensor,
    first: tl.tensor,
    carried: tl.tensor,
    total: tl.tensor,
    time: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    FUTURE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Chunk by chunk: stores the carry, then adds sum_i exp(..) a_i b_i^T of the chunk and scales to its far edge.

    A carry over the past is relative to l before its chunk, one over the future to the last l of its chunk.
    """
    pair = tl.program_id(0).to(tl.int64)  # of batch and head
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_sum = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    carry = tl.load(first + pair * rows * columns + place, mask=in_sum, other=0.0)
    chunks = tl.cdiv(time, CHUNK)
    for step in range(chunks):
        n = chunks - 1 - step if FUTURE else step
        tl.store(carried + (pair * chunks + n) * rows * columns + place, carry, mask=in_sum)
        log_scales, start, end = _chunk_log_scales(log_scale + pair * time, log_scale_before + pair, n, time, CHUNK)
        position = n * CHUNK + tl.arange(0, CHUNK)
        exists = (position < time)[:, None]
        token = (pair * time + position)[:, None]
        left = tl.load(a + token * rows + row[None, :], mask=exists & (row < rows)[None, :], other=0.0)
        right = tl.load(b + token * columns + column[None, :], mask=exists & (column < columns)[None, :], other=0.0)
        left *= tl.exp(start - log_scales if FUTURE else log_scales - end)[:, None]
        carry = carry * tl.exp(start - end) + tl.dot(tl.trans(left), right, input_precision="ieee")
    tl.store(total + pair * rows * columns + place, carry, mask=in_sum)


@triton.jit(do_not_specialize=["time"])
def _mix(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    log_scale: tl.tensor,
    log_scale_before: tl.tensor,
    carried: tl.tensor,
    out: tl.tensor,
    time: tl.tensor,
    inner: tl.tensor,
    columns: tl.tensor,
    inner_stride: tl.tensor,
    column_stride: tl.tensor,
    FUTURE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One chunk and TILE columns: out = (a b^T * decays, masked) c + (a @ carried) * decay since the chunk's edge."""
    chunks = tl.cdiv(time, CHUNK)
    block = tl.program_id(0).to(tl.int64)
    pair, n = block // chunks, block % chunks
    position = n * CHUNK + tl.arange(0, CHUNK)
    exists = (position < time)[:, None]
    token = (pair * time + position)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_columns = (column < columns)[None, :]
    far = tl.zeros((CHUNK, TILE), dtype=out.dtype.element_ty)
    pairs = tl.zeros((CHUNK, CHUNK), dtype=out.dtype.element_ty)
    for first in range(0, inner, TILE):
        entry = first + tl.arange(0, TILE)
        in_inner = entry < inner
        left = tl.load(a + token * inner + entry[None, :], mask=exists & in_inner[None, :], other=0.0)
        right = tl.load(b + token * inner + entry[None, :], mask=exists & in_inner[None, :], other=0.0)
        place = entry[:, None] * inner_stride + column[None, :] * column_stride
        state = tl.load(carried + block * inner * columns + place, mask=in_inner[:, None] & in_columns, other=0.0)
        pairs += tl.dot(left, tl.trans(right), input_precision="ieee")
        far += tl.dot(left, state, input_precision="ieee")
    log_scales, start, end = _chunk_log_scales(log_scale + pair * time, log_scale_before + pair, n, time, CHUNK)
    if FUTURE:
        seen = position[:, None] <= position[None, :]
        differences = log_scales[:, None] - log_scales[None, :]
        since_edge = log_scales - end
    else:
        seen = position[:, None] >= position[None, :]
        differences = log_scales[None, :] - log_scales[:, None]
        since_edge = start - log_scales
    # Not a product with the mask: pairs out of sight have positive exponents and may be infinite.
    pairs = tl.where(seen, pairs * tl.exp(differences), 0.0)
    values = tl.load(c + token * columns + column[None, :], mask=exists & in_columns, other=0.0)
    result = far * tl.exp(since_edge)[:, None] + tl.dot(pairs, values, input_precision="ieee")
    tl.store(out + token * columns + column[None, :], result, mask=exists & in_columns)
