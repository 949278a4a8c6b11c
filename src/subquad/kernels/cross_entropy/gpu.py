"""The cross-entropy of words on a GPU: torch's matrix products, and one Triton kernel between them.

Logits of a chunk of tokens are made by a product in the precision of the weights. The kernel reads each row of them
twice, the second time from the cache, and puts the gradient of the loss in its place, from which two more products make
the gradients of features and weights. Rows whose target is padding have neither loss nor gradient, so that nobody has
to know how many there are: nothing is waited for.

Every number is written by one program and sums have a fixed order: equal inputs give equal bits. With
TRITON_INTERPRET=1 in the environment before triton is imported, the kernel runs on CPU tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.cross_entropy.reference import chunk_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS = 4096
"""Logits of a row that a program works on at a time: 16 for each of its threads."""
ALIGNMENT = 64
"""Rows of logits begin at multiples of so many: products and loads of odd vocabularies are slow without it."""


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pad: int,
    smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of nll; see the public function. dtype: that of the products."""
    grad_enabled = torch.is_grad_enabled()
    wanted = [grad_enabled and x is not None and x.requires_grad for x in (features, weight, bias)]
    total, nll, *_ = _forward(features, weight, bias, target, pad, smoothing, dtype, wanted)
    return total, nll


# ---------------------------------------------------------------------- operations


@torch.library.custom_op("subquad::linear_cross_entropy", mutates_args=())
def _forward(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pad: int,
    smoothing: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums of the loss and of nll, and the gradients of features, weight and bias that are `wanted`, others empty.

    float16 has none of them: the backward pass makes them.
    """
    early = [one and dtype != torch.float16 for one in wanted]
    losses, gradients = _by_chunks(features, weight, bias, target, None, pad, smoothing, dtype, early)
    total, nll = (rows.sum(dtype=torch.float64).float() for rows in losses)
    return total, nll, *gradients


@torch.library.custom_op("subquad::linear_cross_entropy_gradients", mutates_args=())
def _gradients(
    scale: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pad: int,
    smoothing: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of scale * loss that are `wanted`; scale: () float32."""
    _, gradients = _by_chunks(features, weight, bias, target, scale, pad, smoothing, dtype, wanted)
    return gradients


def _room(
    features: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Where gradients go: that of features as a product leaves it, the others summed over chunks in float32."""
    precisions = dtype, torch.float32, torch.float32
    d_features, d_weight, d_bias = (
        features.new_empty(x.shape if one and x is not None else 0, dtype=precision)
        for x, one, precision in zip((features, weight, bias), wanted, precisions, strict=True)
    )
    return d_features, d_weight, d_bias


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    features, weight, bias, *_, dtype, wanted = inputs
    early = [one and dtype != torch.float16 for one in wanted]
    loss = features.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(loss), *_room(features, weight, bias, dtype, early)


@_gradients.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    _, features, weight, bias, *_, dtype, wanted = inputs
    return _room(features, weight, bias, dtype, wanted)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    features, weight, bias, target, *ctx.options = inputs
    ctx.dtypes = [None if x is None else x.dtype for x in (features, weight, bias)]
    ctx.is_late = ctx.options[2] == torch.float16
    ctx.save_for_backward(*((features, weight, bias, target) if ctx.is_late else output[2:]))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, scale: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if scale is None:
        return (None,) * 8
    if tracing.differentiates_backward():
        raise ValueError("the loss over words has no second derivative: call backward without create_graph=True")
    found = _gradients(scale, *ctx.saved_tensors, *ctx.options) if ctx.is_late else ctx.saved_tensors
    scaled: list[Tensor | None] = []
    for gradient, one, dtype in zip(found, ctx.options[3], ctx.dtypes, strict=True):
        gradient = gradient if ctx.is_late or not one else gradient * scale
        scaled.append(gradient.to(dtype) if one else None)
    return *scaled, *(None,) * 5


_forward.register_autograd(_differentiate, setup_context=_remember)


# ---------------------------------------------------------------------- chunks of tokens


def _by_chunks(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: Tensor | None,
    pad: int,
    smoothing: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """loss and nll of every token, (2, n), and the gradients of their sum, times `scale`, that are wanted."""
    count, vocab = target.shape[0], weight.shape[0]
    target, narrow, words = target.contiguous(), features.to(dtype).contiguous(), weight.to(dtype).contiguous()
    losses = features.new_empty(2, count, dtype=torch.float32)
    gradients = _room(features, weight, bias, dtype, wanted)
    d_features, d_weight, d_bias = gradients
    rows = _even_rows(count, chunk_rows(vocab, features.device))
    room = narrow.new_empty(rows, triton.cdiv(vocab, ALIGNMENT) * ALIGNMENT)
    with torch.autocast(features.device.type, enabled=False):
        d_weight.zero_()
        d_bias.zero_()
        for start in range(0, count, rows):
            chunk = slice(start, min(start + rows, count))
            logits = room[: chunk.stop - start, :vocab]
            torch.mm(narrow[chunk], words.T, out=logits)
            _row_losses(logits, bias, target[chunk], scale, losses[:, chunk], pad, smoothing, any(wanted))
            if wanted[0]:
                torch.mm(logits, words, out=d_features[chunk])
            if wanted[1]:
                _add_product_(d_weight, logits.T, narrow[chunk])
            if wanted[2]:
                d_bias += logits.sum(0, dtype=torch.float32)
    return losses, gradients


def _even_rows(count: int, most: int) -> int:
    """Rows of a chunk, so that all chunks but the last have as many, and the last not much fewer."""
    chunks = max(1, triton.cdiv(count, most))
    return max(1, triton.cdiv(triton.cdiv(count, chunks), ALIGNMENT)) * ALIGNMENT


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in float32. a and b may be narrower, which only a GPU's product takes as they are."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _row_losses(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: Tensor | None,
    losses: Tensor,
    pad: int,
    smoothing: float,
    differentiate: bool,
) -> None:
    """Fills losses (2, n) of logits (n, V), and overwrites these by gradients if `differentiate`."""
    count, vocab = logits.shape
    columns = min(MOST_COLUMNS, triton.next_power_of_2(vocab))
    each = smoothing / max(1, vocab - 1)
    if not count:
        return
    with torch.cuda.device_of(logits):
        _row_loss[(count,)](
            logits, bias, target, scale, losses, vocab, logits.stride(0), losses.stride(0), pad,
            1 - smoothing - each, each, HAS_BIAS=bias is not None, HAS_SCALE=scale is not None,
            GRADIENT=differentiate, COLUMNS=columns, num_warps=max(1, min(8, columns // 256)),
        )  # fmt: skip


@triton.jit
def _load_logits(
    logits: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    vocab: tl.tensor,
    counts: tl.tensor,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Columns from `first` on, and a row's logits there in float32: -inf outside, 0 where the row does not count."""
    column = first + tl.arange(0, COLUMNS)
    inside = column < vocab
    x = tl.load(logits + column, mask=inside & counts, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return column, tl.where(inside, x, float("-inf"))


@triton.jit(do_not_specialize=["pad"])
def _row_loss(
    logits: tl.tensor,
    bias: tl.tensor,
    target: tl.tensor,
    scale: tl.tensor,
    losses: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    loss_stride: tl.tensor,
    pad: tl.tensor,
    target_weight: tl.tensor,
    word_weight: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GRADIENT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One row: loss = target_weight * nll + word_weight * sum_v (lse - x_v), nll = lse - x_target.

    GRADIENT: (exp(x - lse) - word_weight - target_weight [v = target]) * scale takes the place of the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    word = tl.load(target + row)
    counts = word != pad
    logits += row * row_stride
    top, mass, total, chosen = float("-inf"), 0.0, 0.0, 0.0
    for first in range(0, vocab, COLUMNS):
        column, x = _load_logits(logits, bias, first, vocab, counts, HAS_BIAS, COLUMNS)
        larger = tl.maximum(top, tl.max(x, 0))
        mass = mass * tl.exp(top - larger) + tl.sum(tl.exp(x - larger), 0)
        total += tl.sum(tl.where(column < vocab, x, 0.0), 0)
        chosen += tl.sum(tl.where(column == word, x, 0.0), 0)
        top = larger
    # a target that is no word shows in the loss and its gradient: a GPU cannot refuse it without being waited for
    is_word = ((word >= 0) & (word < vocab)) | (word == pad)
    log_sum = tl.where(is_word, top + tl.log(mass), float("nan"))
    nll = log_sum - chosen
    loss = target_weight * nll + word_weight * (vocab * log_sum - total)
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    tl.store(losses + loss_stride + row, tl.where(counts, nll, 0.0))
    if GRADIENT:
        factor = tl.load(scale).to(tl.float32) if HAS_SCALE else 1.0
        factor = tl.where(counts, factor, 0.0)
        for first in range(0, vocab, COLUMNS):
            column, x = _load_logits(logits, bias, first, vocab, counts, HAS_BIAS, COLUMNS)
            share = tl.exp(x - log_sum) - word_weight - tl.where(column == word, target_weight, 0.0)
            tl.store(logits + column, (share * factor).to(logits.dtype.element_ty), mask=column < vocab)
