"""Linear attention through features on the CPU, made of torch's own products, in tiles that stay in the cache.

The constant eps is added to sums, never to all features. Threads take sequences or heads; within one, work goes by
tiles, some positions of its heads, read from the projections and written to their gradient in place. Training keeps the
features phi: to compute the exponentials again takes longer. The causal form is in `cpu_causal.py`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.feature_attention import Constant, reference
from subquad.kernels.feature_attention.cpu_causal import causal_attention
from subquad.kernels.feature_attention.cpu_scores import Inputs, exponentials, feature_scores, feature_tiles, parts_of
from subquad.kernels.parallel import parallel_map
from subquad.kernels.tiles import Part

DTYPES = (torch.float32, torch.float64)


def feature_attention(
    qkv: Tensor, matrix: Tensor, mask: Tensor | None, eps: float, least: float, causal: bool, constant: Constant
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    scores = feature_scores(qkv, matrix)
    trains = torch.is_grad_enabled() and (qkv.requires_grad or matrix.requires_grad)
    if causal:
        return causal_attention(qkv, matrix, scores, constant(scores.log_scale), mask, eps, least, trains)
    log_scale = reference.log_scales(scores, mask, constant)
    shift = -scores.c - (log_scale + math.log(matrix.shape[1]) / 2)
    return torch.ops.subquad.feature_attention(qkv, matrix, scores.y, shift, mask, eps, least, trains)[0]


# ---------------------------------------------------------------------- attention


class Sums(NamedTuple):
    """S: values (batch, heads, m, d), and z: counts (batch, heads, m, 1). Their gradients, too."""

    values: Tensor
    counts: Tensor

    def add_eps(self, values: Tensor, counts: Tensor | int, eps: float) -> None:
        """Adds what eps contributes, given sums (batch, heads or 1, 1, d or 1) over the tokens."""
        self.values.add_(values, alpha=eps)
        self.counts.add_(counts, alpha=eps)


@torch.library.custom_op("subquad::feature_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    matrix: Tensor,
    scores: Tensor,
    shift: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, phi (2, batch, heads, time, m; empty unless training), S, z, unclamped divisors (batch, heads, time, 1)."""
    y, kept, values, counts, below = _allocate(qkv, matrix, trains)
    values.zero_()
    counts.zero_()

    def mix(part: Part) -> None:
        sums = Sums(part.of_heads(values), part.of_heads(counts))
        query_phi, key_phi = (part.of_heads(kept[side]) if trains else None for side in range(2))
        own_mask = None if mask is None else mask[part.rows]
        _sum_keys(part.of_tokens(qkv), part.of_heads(scores[1]), part.of_heads(shift[1]), own_mask, eps, key_phi, sums)
        own = part.of_heads(scores[0]), part.of_heads(shift[0])
        _read_sums(own, query_phi, sums, eps, least, part.of_tokens(y), part.of_heads(below))

    list(parallel_map(mix, parts_of(qkv)))
    return y, kept, values, counts, below


def _read_sums(
    queries: tuple[Tensor, Tensor], kept: Tensor | None, sums: Sums, eps: float, least: float, y: Tensor, below: Tensor
) -> None:
    """Fills y (batch, time, heads, d) and the divisors. queries: their scores and shift."""
    eps_values, eps_counts = (part.sum(-2, keepdim=True).mul_(eps) for part in sums)
    for tile in feature_tiles(y, queries[0].shape[-1]):
        phi = exponentials(*queries, tile, kept)
        above = torch.bmm(phi, tile.of_heads(sums.values)).add_(tile.of_heads(eps_values))
        divisor = torch.bmm(phi, tile.of_heads(sums.counts)).add_(tile.of_heads(eps_counts))
        tile.of_positions(below).copy_(divisor)
        divisor.clamp_(min=least).reciprocal_()
        target = tile.view(y)
        torch.mul(above.view(target.shape), divisor.view(*target.shape[:3], 1), out=target)


def _sum_keys(
    qkv: Tensor, scores: Tensor, shift: Tensor, mask: Tensor | None, eps: float, kept: Tensor | None, sums: Sums
) -> None:
    """Adds up S and z, from zeros, and keeps phi of the keys: zeros where there is none."""
    batch, time, _, heads, width = qkv.shape
    total = qkv.new_zeros(batch, heads, 1, width)
    for tile in feature_tiles(qkv, scores.shape[-1]):
        phi, v = exponentials(scores, shift, tile, kept), tile.pack(qkv[:, :, 2])
        if mask is not None:
            tile.fill_hidden(phi, mask, 0)
            v = tile.fill_hidden(v.clone(), mask, 0)  # a packed copy that was not needed is the input itself
        tile.of_heads(sums.values).baddbmm_(phi.transpose(1, 2), v)
        tile.of_heads(sums.counts).add_(phi.sum(1).unsqueeze(-1))
        tile.of_heads(total).add_(v.sum(1, keepdim=True))
    number = time if mask is None else mask.sum(1).to(qkv.dtype).view(-1, 1, 1, 1)
    sums.add_eps(total, number, eps)


def _allocate(qkv: Tensor, matrix: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for what `_forward` gives."""
    batch, time, _, heads, width = qkv.shape
    features = matrix.shape[1]
    return (
        qkv.new_empty(batch, time, heads, width),
        qkv.new_empty((2, batch, heads, time, features) if trains else (2, 0)),
        qkv.new_empty(batch, heads, features, width),
        qkv.new_empty(batch, heads, features, 1),
        qkv.new_empty(batch, heads, time, 1),
    )


# ---------------------------------------------------------------------- gradients


@torch.library.custom_op("subquad::feature_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    y: Tensor,
    phi: Tensor,
    values: Tensor,
    counts: Tensor,
    below: Tensor,
    qkv: Tensor,
    matrix: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv, and of W where that learns (else empty)."""
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)

    def differentiate(part: Part) -> Tensor:
        inputs = Inputs(part.of_tokens(qkv), matrix[part.heads], part.of_tokens(d_qkv), learns)
        sums = Sums(part.of_heads(values), part.of_heads(counts))
        query_phi, key_phi = (part.of_heads(phi[side]) for side in range(2))
        d_sums = _queries_backward(
            part.of_tokens(grad), part.of_tokens(y), query_phi, sums, part.of_heads(below), inputs, eps, least
        )
        _keys_backward(key_phi, d_sums, inputs, None if mask is None else mask[part.rows], eps)
        return inputs.d_matrix

    parts = parts_of(qkv)
    gradients = list(parallel_map(differentiate, parts))
    d_matrix = torch.zeros_like(matrix) if learns else matrix.new_empty(0)
    if learns:
        for part, gradient in zip(parts, gradients, strict=True):
            d_matrix[part.heads] += gradient
    return d_qkv, d_matrix


def _keys_backward(phi: Tensor, d_sums: Sums, inputs: Inputs, mask: Tensor | None, eps: float) -> None:
    """Gradients of keys and values, which go to `inputs`."""
    eps_values = d_sums.values.sum(-2, keepdim=True).mul_(eps)
    for tile in feature_tiles(inputs.qkv, phi.shape[-1]):
        key, v, d_values = tile.of_positions(phi), tile.pack(inputs.qkv[:, :, 2]), tile.of_heads(d_sums.values)
        d_phi = torch.bmm(v, d_values.transpose(1, 2)).add_(tile.of_heads(d_sums.counts).transpose(1, 2))
        inputs.add(d_phi.mul_(key), 1, tile)
        d_v = torch.bmm(key, d_values).add_(tile.of_heads(eps_values))
        if mask is not None:
            tile.fill_hidden(d_v, mask, 0)
        tile.unpack(d_v, inputs.d_qkv[:, :, 2])


def _queries_backward(
    grad: Tensor, y: Tensor, phi: Tensor, sums: Sums, below: Tensor, inputs: Inputs, eps: float, least: float
) -> Sums:
    """Gradients of S and z; those of queries go to `inputs`."""
    d_sums = Sums(torch.zeros_like(sums.values), torch.zeros_like(sums.counts))
    total, total_below = torch.zeros_like(sums.values[:, :, :1]), torch.zeros_like(sums.counts[:, :, :1])
    inverse, unclamped = below.clamp(min=least).reciprocal_(), below >= least
    for tile in feature_tiles(y, sums.values.shape[2]):
        query, out = tile.of_positions(phi), tile.view(y)
        d_above = torch.mul(
            tile.view(grad),
            inverse[tile.rows, :, tile.time],
            out=torch.empty_like(out, memory_format=torch.contiguous_format),
        )
        d_below = (d_above * out).sum(-1, keepdim=True).mul_(unclamped[tile.rows, :, tile.time]).neg_().flatten(0, 1)
        d_above = d_above.flatten(0, 1)
        d_phi = torch.bmm(d_above, tile.of_heads(sums.values).transpose(1, 2))
        d_phi.addcmul_(d_below, tile.of_heads(sums.counts).transpose(1, 2))
        inputs.add(d_phi.mul_(query), 0, tile)
        tile.of_heads(d_sums.values).baddbmm_(query.transpose(1, 2), d_above)
        tile.of_heads(d_sums.counts).baddbmm_(query.transpose(1, 2), d_below)
        tile.of_heads(total).add_(d_above.sum(1, keepdim=True))
        tile.of_heads(total_below).add_(d_below.sum(1, keepdim=True))
    d_sums.add_eps(total, total_below, eps)
    return d_sums


# ---------------------------------------------------------------------- for torch.compile and autograd


@_forward.register_fake
def _fake_forward(qkv: Tensor, matrix: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _allocate(qkv, matrix, others[-1])


@_backward.register_fake
def _fake_backward(grad: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    qkv, matrix, learns = others[5], others[6], others[-1]
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_matrix = torch.empty_like(matrix, memory_format=torch.contiguous_format) if learns else matrix.new_empty(0)
    return d_qkv, d_matrix


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, matrix, _, shift, mask, ctx.eps, ctx.least, _ = inputs
    ctx.save_for_backward(*output, qkv, matrix, mask, shift)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 8
    learns = ctx.needs_input_grad[1]
    *saved, qkv, matrix, mask, shift = ctx.saved_tensors
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, matrix: Tensor) -> Tensor:
            scores = reference.feature_scores(qkv, matrix)
            log_scale = (-shift - scores.c - math.log(matrix.shape[1]) / 2).detach()
            return reference.attend(qkv, scores, log_scale, mask, ctx.eps, ctx.least)

        return *tracing.gradients_of(attend, (qkv, matrix), grad), *(None,) * 6
    settings = (ctx.eps, ctx.least, learns)
    d_qkv, d_matrix = torch.ops.subquad.feature_attention_backward(grad, *saved, qkv, matrix, mask, *settings)
    return d_qkv, d_matrix if learns else None, *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_remember)
