"""Landmark attention on the CPU, made of torch's own products, by tiles of time.

Landmarks are few; what has the length of the sequence is A, t, a and W. Work goes by tiles of time, whose share of each
of these fits the cache, for one head, or for as many heads and sequences as a tile has room for. Training keeps them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.landmark_attention import LEAST_WEIGHT, OptWeights, reference
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.parallel import parallel_map
from subquad.kernels.tiles import Part, Tile, parts_by_size, tiles_of

DTYPES = (torch.float32, torch.float64)


def landmark_attention(
    qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, opt: OptWeights | None, mask: Tensor | None
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    small = (w_keys, w_queries, shared, *((None, None) if opt is None else opt[:2]))
    mean_weights, alpha = (None, 0.0) if opt is None else (opt.mean_weights.expand(qkv.shape[0], -1), opt.alpha)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (qkv, *small))
    return torch.ops.subquad.landmark_attention(qkv, *small, mean_weights, mask, alpha, trains)[0]


# ---------------------------------------------------------------------- what tiles keep


class Kept(NamedTuple):
    """What is computed of a tile, of n heads and t positions.

    A (n, c, t); W, and with weights t below it, (n, 2c, t); a (n, c, t), which is infinite where it is at its least, so
    that no gradient flows through what is divided by it.
    """

    tile: Tile
    key_probs: Tensor
    by_query: Tensor
    weights: Tensor | None


class Partition:
    """What forward and backward share: parts, and where what their tiles keep lies in one buffer."""

    def __init__(self, qkv: Tensor, w: Tensor, weighted: bool) -> None:
        self.batch, self.time, _, self.heads, width = qkv.shape
        self.landmarks, self.weighted = w.shape[2], weighted
        self.scale = width**-0.5
        self.per_head = (4 if weighted else 2) * self.landmarks * self.time

    def size(self) -> int:
        return self.batch * self.heads * self.per_head

    def parts(self) -> list[Part]:
        return parts_by_size(self.batch, self.heads, self.landmarks * self.time)

    def of_part(self, part: Part, buffer: Tensor) -> Tensor:
        begin = (part.rows.start * self.heads + part.heads.start) * self.per_head
        return buffer[begin : begin + self.part_size(part)]

    def part_size(self, part: Part) -> int:
        return (part.rows.stop - part.rows.start) * (part.heads.stop - part.heads.start) * self.per_head

    def kept(self, qkv: Tensor, buffer: Tensor) -> list[Kept]:
        """Views of a part's buffer, for the part's own qkv.

        The matrices of a tile lie together: rows a whole length apart would share cache sets.
        """
        begin, c, found = 0, self.landmarks, []
        for tile in tiles_of(qkv, c):
            n = (tile.rows.stop - tile.rows.start) * qkv.shape[3]
            t = tile.time.stop - tile.time.start
            sizes = [n * c * t, n * 2 * c * t, n * c * t] if self.weighted else [n * c * t] * 2
            pieces = buffer[begin : begin + sum(sizes)].split(sizes)
            begin += sum(sizes)
            key_probs, by_query, *weights = (piece.view(n, -1, t) for piece in pieces)
            found.append(Kept(tile, key_probs, by_query, weights[0] if weights else None))
        return found


# ---------------------------------------------------------------------- forward


def _softmax_(logits: list[Tensor]) -> Tensor:
    """Overwrites logits, cut into tiles (n, c, t), by their softmax over all tiles; returns their LSE (n, c, 1)."""
    tops = torch.stack([part.amax(-1, keepdim=True) for part in logits])
    largest = tops.amax(0)
    total = torch.stack([part.sub_(largest).exp_().sum(-1, keepdim=True) for part in logits]).sum(0)
    for part in logits:
        part.div_(total)
    return largest + total.log()


def _summarise_keys(qkv: Tensor, w: Tensor, mask: Tensor | None, kept: list[Kept]) -> tuple[Tensor, Tensor]:
    """u (n, c, d) and LSE_j l (n, c, 1); fills `key_probs`. w: s w (n, c, d)."""
    scale, u = qkv.shape[-1] ** -0.5, torch.zeros_like(w)
    for tile, logits, *_ in kept:
        k = tile.pack(qkv[:, :, 1])
        torch.bmm(w, k.transpose(1, 2), out=logits)
        logits -= torch.linalg.vecdot(k, k).mul_(scale / 2)[:, None]
        _hide(logits, tile, mask, MASK_VALUE)
    mass = _softmax_([tile.key_probs for tile in kept])
    for tile, key_probs, *_ in kept:
        u.baddbmm_(key_probs, tile.pack(qkv[:, :, 2]))
    return u, mass


def _hide(x: Tensor, tile: Tile, mask: Tensor | None, value: float) -> None:
    """Sets x (n, c, t), in place, to a value where the mask (batch, time) of the part is False."""
    if mask is not None:
        tile.fill_hidden(x.transpose(1, 2), mask, value)


@torch.library.custom_op("subquad::landmark_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    w_keys: Tensor,
    w_queries: Tensor,
    shared: Tensor,
    directions: Tensor | None,
    balance: Tensor | None,
    mean_weights: Tensor | None,
    mask: Tensor | None,
    alpha: float,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, u, and what tiles keep (empty unless training)."""
    partition = Partition(qkv, w_keys, directions is not None)
    y = qkv.new_empty(qkv.shape[0], qkv.shape[1], *qkv.shape[3:])
    u = torch.empty_like(w_keys, memory_format=torch.contiguous_format)
    buffer = qkv.new_empty(partition.size() if trains else 0)
    c, scale = partition.landmarks, partition.scale
    both = w_queries if directions is None else torch.cat([w_queries, directions], 2)

    def mix(part: Part) -> None:
        own, own_y, own_mask = part.of_tokens(qkv), part.of_tokens(y), None if mask is None else mask[part.rows]
        room = partition.of_part(part, buffer) if trains else qkv.new_empty(partition.part_size(part))
        kept = partition.kept(own, room)
        own_u, mass = _summarise_keys(own, _packed(w_keys, part) * scale, own_mask, kept)
        _unpack(own_u, u, part)
        offset, own_both = _packed(shared, part) + mass, _packed(both, part) * scale
        for tile, _, by_query, _ in kept:
            torch.bmm(own_both, tile.pack(own[:, :, 0]).transpose(1, 2), out=by_query)
            _hide(by_query[:, c:], tile, own_mask, MASK_VALUE)
        if directions is not None:
            _softmax_([tile.by_query[:, c:] for tile in kept])
        for tile, _, by_query, weights in kept:
            probs = by_query[:, :c].add_(offset)
            probs.sub_(probs.amax(1, keepdim=True)).exp_()
            if balance is not None and mean_weights is not None and weights is not None:
                t = by_query[:, c:]
                torch.sub(t, torch.bmm(_for_heads(mean_weights, part).transpose(1, 2), t), out=weights)
                torch.add(_packed(balance, part), weights, alpha=alpha, out=weights)
                probs.mul_(weights.clamp_(min=LEAST_WEIGHT))
                F.threshold(weights, LEAST_WEIGHT, torch.inf, inplace=True)
            probs.div_(probs.sum(1, keepdim=True))
            tile.unpack(torch.bmm(probs.transpose(1, 2), own_u), own_y)

    list(parallel_map(mix, partition.parts()))
    return y, u, buffer


def _packed(x: Tensor, part: Part) -> Tensor:
    """The part of x (batch, heads, c, ...): (n, c, ...)."""
    return part.of_heads(x).flatten(0, 1)


def _unpack(values: Tensor, x: Tensor, part: Part) -> None:
    """Writes values (n, c, ...) to where `_packed` reads in x."""
    target = part.of_heads(x)
    target.copy_(values.view(target.shape))


def _for_heads(mean_weights: Tensor, part: Part) -> Tensor:
    """p (batch, c) for each head of a part: (n, c, 1)."""
    return mean_weights[part.rows].repeat_interleave(part.heads.stop - part.heads.start, 0)[..., None]


# ---------------------------------------------------------------------- backward


def _through_weights(
    grad: Tensor, u: Tensor, mean_weights: Tensor | None, mask: Tensor | None, alpha: float, kept: list[Kept]
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """From the gradient of y to those of the logits by query, s w'.q and s f.q below it, each (n, c or 2c, t).

    Also the gradients of u (n, c, d), of b, and of beta, both (n, c, 1).
    """
    c = u.shape[1]
    d_u, d_by_query = torch.zeros_like(u), []
    d_shared, d_balance, mean = u.new_zeros(3, *u.shape[:2], 1).unbind()
    for tile, _, by_query, weights in kept:
        g, probs, d_both = tile.pack(grad), by_query[:, :c], torch.empty_like(by_query)
        d_logits = d_both[:, :c]
        d_by_query.append(d_both)
        d_u.baddbmm_(probs, g)
        torch.mul(torch.bmm(u, g.transpose(1, 2)), probs, out=d_logits)
        d_logits.addcmul_(probs, d_logits.sum(1, keepdim=True), value=-1)
        d_shared += d_logits.sum(-1, keepdim=True)
        if mean_weights is not None and weights is not None:
            d_weights = torch.div(d_logits, weights, out=d_both[:, c:])
            d_balance += d_weights.sum(-1, keepdim=True)
            d_weights.addcmul_(mean_weights, d_weights.sum(1, keepdim=True), value=-1).mul_(by_query[:, c:])
            mean += d_weights.sum(-1, keepdim=True)
    if mean_weights is not None:
        for (tile, _, by_query, _), d_both in zip(kept, d_by_query, strict=True):
            # what is hidden has t = 0, unless nothing else is there
            d_t = d_both[:, c:].addcmul_(by_query[:, c:], mean, value=-1).mul_(alpha)
            _hide(d_t, tile, mask, 0)
    return d_by_query, d_u, d_shared, d_balance


def _through_keys(
    qkv: Tensor, w: Tensor, d_u: Tensor, constant: Tensor, mask: Tensor | None, d_qkv: Tensor, kept: list[Kept]
) -> Tensor:
    """Writes the gradients of k and v; returns that of w, before its factor s. w: s w (n, c, d).

    dl = A (v.du + constant), where constant (n, c, 1) is the gradient of LSE_j l, minus u.du.
    """
    scale, d_w = qkv.shape[-1] ** -0.5, torch.zeros_like(w)
    for tile, key_probs, *_ in kept:
        k, v = tile.pack(qkv[:, :, 1]), tile.pack(qkv[:, :, 2])
        d_logits = torch.bmm(d_u, v.transpose(1, 2)).add_(constant).mul_(key_probs)
        _hide(d_logits, tile, mask, 0)
        d_k = torch.bmm(d_logits.transpose(1, 2), w)
        d_k.addcmul_(k, d_logits.sum(1)[..., None], value=-scale)
        d_w.baddbmm_(d_logits, k)
        tile.unpack(d_k, d_qkv[:, :, 1])
        tile.unpack(torch.bmm(key_probs.transpose(1, 2), d_u), d_qkv[:, :, 2])
    return d_w


@torch.library.custom_op("subquad::landmark_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    u: Tensor,
    buffer: Tensor,
    qkv: Tensor,
    w_keys: Tensor,
    w_queries: Tensor,
    shared: Tensor,
    directions: Tensor | None,
    balance: Tensor | None,
    mean_weights: Tensor | None,
    mask: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkv, w, w', b, f and beta; those of what is absent are empty."""
    d_qkv, *d_small = _like(qkv, w_keys, w_queries, shared, directions, balance)
    partition = Partition(qkv, w_keys, directions is not None)
    c, scale = partition.landmarks, partition.scale
    both = w_queries if directions is None else torch.cat([w_queries, directions], 2)

    def differentiate(part: Part) -> None:
        own, own_d_qkv, own_mask = part.of_tokens(qkv), part.of_tokens(d_qkv), None if mask is None else mask[part.rows]
        kept = partition.kept(own, partition.of_part(part, buffer))
        own_u, own_both = _packed(u, part), _packed(both, part) * scale
        own_weights = None if mean_weights is None else _for_heads(mean_weights, part)
        d_by_query, d_u, d_shared, d_balance = _through_weights(
            part.of_tokens(grad), own_u, own_weights, own_mask, alpha, kept
        )
        d_both = torch.zeros_like(own_both)
        for (tile, *_), d_logits in zip(kept, d_by_query, strict=True):
            tile.unpack(torch.bmm(d_logits.transpose(1, 2), own_both), own_d_qkv[:, :, 0])
            d_both.baddbmm_(d_logits, tile.pack(own[:, :, 0]))
        constant = d_shared - (own_u * d_u).sum(-1, keepdim=True)
        d_w = _through_keys(own, _packed(w_keys, part) * scale, d_u, constant, own_mask, own_d_qkv, kept)
        d_both.mul_(scale)
        gradients = (d_w.mul_(scale), d_both[:, :c], d_shared, d_both[:, c:], d_balance)
        for whole, gradient in zip(d_small[: 3 if directions is None else 5], gradients, strict=False):
            _unpack(gradient.contiguous(), whole, part)

    list(parallel_map(differentiate, partition.parts()))
    d_w_keys, d_w_queries, d_shared, d_directions, d_balance = d_small
    return d_qkv, d_w_keys, d_w_queries, d_shared, d_directions, d_balance


def _like(*tensors: Tensor | None) -> list[Tensor]:
    """Room for gradients; none for what is absent."""
    first = tensors[0]
    assert first is not None
    contiguous = torch.contiguous_format
    return [first.new_empty(0) if t is None else torch.empty_like(t, memory_format=contiguous) for t in tensors]


# ---------------------------------------------------------------------- for torch


@_forward.register_fake
def _fake_forward(qkv: Tensor, w_keys: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = qkv.new_empty(qkv.shape[0], qkv.shape[1], *qkv.shape[3:])
    size = Partition(qkv, w_keys, others[2] is not None).size() if others[-1] else 0
    return y, _like(w_keys)[0], qkv.new_empty(size)


@_backward.register_fake
def _fake_backward(grad: Tensor, u: Tensor, buffer: Tensor, *inputs: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(_like(*inputs[:6]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.alpha = inputs[8]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 10
    u, buffer, *inputs = ctx.saved_tensors
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, *given: Any) -> Tensor:
            opt = None if given[0] is None else OptWeights(given[0], given[1], inputs[6], ctx.alpha)
            return reference.landmark_attention(qkv, w_keys, w_queries, shared, opt, inputs[7])

        return *tracing.gradients_of(attend, inputs[:6], grad), *(None,) * 4
    gradients = torch.ops.subquad.landmark_attention_backward(grad, u, buffer, *inputs, ctx.alpha)
    present = (None if t is None else gradient for t, gradient in zip(inputs[:6], gradients, strict=True))
    return (*present, *(None,) * 4)


_forward.register_autograd(_differentiate, setup_context=_remember)
