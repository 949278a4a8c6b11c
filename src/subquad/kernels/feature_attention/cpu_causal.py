"""Causal linear attention through features on the CPU: a scan over blocks of positions, made of torch's own products.

With M_i the largest log scale of the keys up to i, keys k_j = phi(k_j) relative to M_j, queries q_i = phi(q_i) + eps
and s_i = eps sum(q_i), the weight of a pair j <= i is

    w_ij = exp(M_j - M_i) q_i.k_j + s_i

Pairs are formed within a block; what came before it is in sums, relative to M at its end. No factor between two scales
exceeds 1. Threads take sequences or heads, and of these so many at once that a block of them stays in the cache.
Training keeps phi; the sums at the beginning of every block are summed again for the gradient.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.feature_attention import FeatureScores, reference
from subquad.kernels.feature_attention.cpu_scores import Inputs, exponentials, parts_of
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.parallel import parallel_map
from subquad.kernels.scan.reference import running_maximum
from subquad.kernels.tiles import TILE_ELEMENTS, Part, Tile

BLOCK = 64
"""Positions of a block, at most: its pairs cost about as much as its sums then."""


def causal_attention(
    qkv: Tensor,
    matrix: Tensor,
    scores: FeatureScores,
    log_scale: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    trains: bool,
) -> Tensor:
    """y (batch, time, heads, d). log_scale: (2, batch, heads, time), that of every query and key alone."""
    given = qkv, matrix, scores.y, scores.c, log_scale, mask, eps, least, trains
    return torch.ops.subquad.causal_feature_attention(*given)[0]


def _scales(c: Tensor, log_scale: Tensor, mask: Tensor | None, features: int) -> tuple[Tensor, Tensor]:
    """What is added to y for phi of queries and of keys (2, batch, heads, time), and M (batch, heads, time)."""
    query, key = log_scale
    reached = running_maximum(key if mask is None else key.masked_fill(~mask[:, None], MASK_VALUE))
    return -c - (torch.stack([query, reached]) + math.log(features) / 2), reached


# ---------------------------------------------------------------------- blocks


class Block(NamedTuple):
    """Some positions (t) of n heads, and the factors between scales, which are constants for the gradient.

    within: exp(M_j - M_i), (n, t, t), anything above the diagonal; None: 1. since: exp(M_before - M_i), and until:
    exp(M_j - M_end), both (n, t, 1); over: exp(M_before - M_end), (n, 1, 1).
    """

    tile: Tile
    within: Tensor | None
    since: Tensor
    until: Tensor
    over: Tensor

    def weights(self, q: Tensor, k: Tensor, s: Tensor, mask: Tensor | None) -> Tensor:
        """w (n, t, t) of queries and keys (n, t, m) and s (n, t, 1)."""
        return self.only_pairs(self.scaled(torch.bmm(q, k.transpose(1, 2))).add_(s), mask)

    def scaled(self, pairs: Tensor) -> Tensor:
        """Pairs (n, t, t), in place, times exp(M_j - M_i)."""
        return pairs if self.within is None else pairs.mul_(self.within)

    def only_pairs(self, pairs: Tensor, mask: Tensor | None) -> Tensor:
        """Pairs (n, t, t) with zeros, in place, above the diagonal and where there is no key."""
        pairs.tril_()
        if mask is not None:
            self.tile.fill_hidden(pairs.transpose(1, 2), mask, 0)
        return pairs

    def values(self, qkv: Tensor, mask: Tensor | None) -> Tensor:
        """v (n, t, d), zeros where there is no key."""
        v = self.tile.pack(qkv[:, :, 2])
        # a packed copy that was not needed is the input itself
        return v if mask is None else self.tile.fill_hidden(v.clone(), mask, 0)


def _groups(x: Tensor, features: int) -> list[slice]:
    """The rows of x (batch, time, ..., heads, d) that go through the scan together."""
    time = min(x.shape[1], BLOCK)
    size = max(1, TILE_ELEMENTS // max(1, x.shape[-2] * time * max(x.shape[-1], features, time)))
    return [slice(start, start + size) for start in range(0, x.shape[0], size)]


def _blocks(rows: slice, reached: Tensor) -> Iterator[Block]:
    """The blocks of some rows, one after the other. reached: M (batch, heads, time)."""
    time = reached.shape[2]
    size = max(1, -(-time // max(1, -(-time // BLOCK))))
    before = torch.full_like(reached[rows, :, :1].flatten(0, 1), MASK_VALUE)
    for start in range(0, time, size):
        tile = Tile(rows, slice(start, start + size))
        scale = tile.of_positions(reached)
        end = scale[:, -1:]
        level = torch.equal(scale[:, :1], end)  # M hardly grows after the first few hundred positions
        within = None if level else (scale[:, None] - scale[:, :, None]).clamp_(max=0).exp_()
        factors = (before - scale).exp_(), (scale - end).exp_(), (before - end).exp_()
        yield Block(tile, within, *(factor.unsqueeze(-1) for factor in factors))
        before = end


class Sums(NamedTuple):
    """Over keys: S (n, m, d) and z (n, m, 1) of features; sum v_j (n, 1, d) and the number of keys (n, 1, 1)."""

    values: Tensor
    counts: Tensor
    plain: Tensor
    number: Tensor

    def after(self, block: Block, k: Tensor, v: Tensor, mask: Tensor | None) -> "Sums":
        """The sums with those of a block's keys k (n, t, m) and values v (n, t, d)."""
        keys, tile = k.transpose(1, 2), block.tile
        number: Tensor | int = k.shape[1]
        if mask is not None:
            keys_of_row = mask[tile.rows, tile.time].sum(1)
            number = keys_of_row.repeat_interleave(len(v) // len(keys_of_row))[:, None, None]
        return Sums(
            torch.baddbmm(self.values * block.over, keys, v * block.until),
            torch.baddbmm(self.counts * block.over, keys, block.until),
            self.plain + v.sum(1, keepdim=True),
            self.number + number,
        )


def _no_sums(k: Tensor, like: Tensor) -> Sums:
    """The sums before the first block, zeros, for keys k (n, t, m) and values as wide as `like` (..., d)."""
    n, _, features = k.shape
    width = like.shape[-1]
    return Sums(*(like.new_zeros(n, *shape) for shape in ((features, width), (features, 1), (1, width), (1, 1))))


# ---------------------------------------------------------------------- attention


@torch.library.custom_op("subquad::causal_feature_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    matrix: Tensor,
    scores: Tensor,
    c: Tensor,
    log_scale: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, phi (2, batch, heads, time, m; empty unless training), unclamped divisors (batch, heads, time, 1)."""
    y, kept, below = _allocate(qkv, matrix, trains)
    shift, reached = _scales(c, log_scale, mask, matrix.shape[1])

    def mix(part: Part) -> None:
        own, own_mask = part.of_tokens(qkv), None if mask is None else mask[part.rows]
        sides = [
            (part.of_heads(scores[side]), part.of_heads(shift[side]), part.of_heads(kept[side]) if trains else None)
            for side in range(2)
        ]
        for rows in _groups(own, matrix.shape[1]):
            sums = None
            for block in _blocks(rows, part.of_heads(reached)):
                (query, query_shift, query_kept), (key, key_shift, key_kept) = sides
                q = exponentials(query, query_shift, block.tile, query_kept) + eps
                k = exponentials(key, key_shift, block.tile, key_kept)
                if own_mask is not None:
                    block.tile.fill_hidden(k, own_mask, 0)
                v = block.values(own, own_mask)
                sums = sums or _no_sums(k, v)
                above, divisor = _read(block, q, k, v, sums, own_mask, eps)
                block.tile.of_positions(part.of_heads(below)).copy_(divisor)
                block.tile.unpack(above.div_(divisor.clamp_(min=least)), part.of_tokens(y))
                sums = sums.after(block, k, v, own_mask)

    list(parallel_map(mix, parts_of(qkv)))
    return y, kept, below


def _read(
    block: Block, q: Tensor, k: Tensor, v: Tensor, sums: Sums, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """sum_j w_ij v_j (n, t, d) and sum_j w_ij (n, t, 1) over the keys before a block and in it."""
    s = q.sum(-1, keepdim=True).mul_(eps)
    w = block.weights(q, k, s, mask)
    above = torch.bmm(q, sums.values).mul_(block.since).addcmul_(s, sums.plain).baddbmm_(w, v)
    below = torch.bmm(q, sums.counts).mul_(block.since).addcmul_(s, sums.number).add_(w.sum(-1, keepdim=True))
    return above, below


def _allocate(qkv: Tensor, matrix: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what `_forward` gives."""
    batch, time, _, heads, width = qkv.shape
    phi = (2, batch, heads, time, matrix.shape[1]) if trains else (2, 0)
    return qkv.new_empty(batch, time, heads, width), qkv.new_empty(phi), qkv.new_empty(batch, heads, time, 1)


# ---------------------------------------------------------------------- gradients


@torch.library.custom_op("subquad::causal_feature_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    y: Tensor,
    phi: Tensor,
    below: Tensor,
    qkv: Tensor,
    matrix: Tensor,
    c: Tensor,
    log_scale: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv, and of W where that learns (else empty)."""
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    _, reached = _scales(c, log_scale, mask, matrix.shape[1])

    def differentiate(part: Part) -> Tensor:
        inputs = Inputs(part.of_tokens(qkv), matrix[part.heads], part.of_tokens(d_qkv), learns)
        own_mask = None if mask is None else mask[part.rows]
        given = part.of_tokens(grad), part.of_tokens(y), part.of_heads(below)
        for rows in _groups(inputs.qkv, matrix.shape[1]):
            blocks = list(_blocks(rows, part.of_heads(reached)))
            _group_backward(blocks, part.of_heads(phi[0]), part.of_heads(phi[1]), given, inputs, own_mask, eps, least)
        return inputs.d_matrix

    parts = parts_of(qkv)
    gradients = list(parallel_map(differentiate, parts))
    d_matrix = torch.zeros_like(matrix) if learns else matrix.new_empty(0)
    if learns:
        for part, gradient in zip(parts, gradients, strict=True):
            d_matrix[part.heads] += gradient
    return d_qkv, d_matrix


def _group_backward(
    blocks: list[Block],
    queries: Tensor,
    keys: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    inputs: Inputs,
    mask: Tensor | None,
    eps: float,
    least: float,
) -> None:
    """Gradients of the rows of these blocks, which go to `inputs`. queries, keys: phi; given: those of y, y, divisors.

    The sums' own gradients come from the end: of S and z (n, m, d or 1), and of the sum of values (n, 1, d).
    """
    if not blocks:
        return
    before = [_no_sums(blocks[0].tile.of_positions(keys), inputs.qkv)]
    for block in blocks[:-1]:
        k = block.tile.of_positions(keys)
        before.append(before[-1].after(block, k, block.values(inputs.qkv, mask), mask))
    later = before[0]
    for block, sums in zip(reversed(blocks), reversed(before), strict=True):
        tile = block.tile
        phi, k, v = tile.of_positions(queries), tile.of_positions(keys), block.values(inputs.qkv, mask)
        q = phi + eps
        s = q.sum(-1, keepdim=True).mul_(eps)
        d_above, d_below = _ratio_backward(tile, *given, least)
        d_v = torch.bmm(block.weights(q, k, s, mask).transpose(1, 2), d_above).add_(later.plain)
        d_v.addcmul_(torch.bmm(k, later.values), block.until)
        d_w = block.only_pairs(torch.bmm(d_above, v.transpose(1, 2)).add_(d_below), mask)
        d_s = d_w.sum(-1, keepdim=True).add_((d_above * sums.plain).sum(-1, keepdim=True))
        d_s.addcmul_(d_below, sums.number)
        block.scaled(d_w)
        d_q = torch.bmm(d_above, sums.values.transpose(1, 2)).addcmul_(d_below, sums.counts.transpose(1, 2))
        d_q.mul_(block.since).baddbmm_(d_w, k).add_(d_s, alpha=eps)
        d_k = torch.bmm(v, later.values.transpose(1, 2)).add_(later.counts.transpose(1, 2)).mul_(block.until)
        d_k.baddbmm_(d_w.transpose(1, 2), q)
        inputs.add(d_q.mul_(phi), 0, tile)
        inputs.add(d_k.mul_(k), 1, tile)
        if mask is not None:
            tile.fill_hidden(d_v, mask, 0)
        tile.unpack(d_v, inputs.d_qkv[:, :, 2])
        back = q.transpose(1, 2)
        later = Sums(
            torch.baddbmm(later.values * block.over, back, d_above * block.since),
            torch.baddbmm(later.counts * block.over, back, d_below * block.since),
            later.plain + (s * d_above).sum(1, keepdim=True),
            later.number,
        )


def _ratio_backward(tile: Tile, grad: Tensor, y: Tensor, below: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Gradients of sum_j w_ij v_j (n, t, d) and sum_j w_ij (n, t, 1), given that of their ratio y."""
    divisor = tile.of_positions(below)
    d_above = tile.pack(grad) / divisor.clamp(min=least)
    d_below = (d_above * tile.pack(y)).sum(-1, keepdim=True).mul_(divisor >= least).neg_()
    return d_above, d_below


# ---------------------------------------------------------------------- for torch.compile and autograd


@_forward.register_fake
def _fake_forward(qkv: Tensor, matrix: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate(qkv, matrix, others[-1])


@_backward.register_fake
def _fake_backward(grad: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    qkv, matrix, learns = others[3], others[4], others[-1]
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_matrix = torch.empty_like(matrix, memory_format=torch.contiguous_format) if learns else matrix.new_empty(0)
    return d_qkv, d_matrix


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, matrix, _, c, log_scale, mask, ctx.eps, ctx.least, _ = inputs
    ctx.save_for_backward(*output, qkv, matrix, c, log_scale, mask)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 9
    learns = ctx.needs_input_grad[1]
    *_, qkv, matrix, _, log_scale, mask = ctx.saved_tensors
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, matrix: Tensor) -> Tensor:
            scores = reference.feature_scores(qkv, matrix)
            return reference.causal_attention(qkv, scores, mask, ctx.eps, ctx.least, lambda _: log_scale)

        return *tracing.gradients_of(attend, (qkv, matrix), grad), *(None,) * 7
    settings = (ctx.eps, ctx.least, learns)
    d_qkv, d_matrix = torch.ops.subquad.causal_feature_attention_backward(grad, *ctx.saved_tensors, *settings)
    return d_qkv, d_matrix if learns else None, *(None,) * 7


_forward.register_autograd(_differentiate, setup_context=_remember)
