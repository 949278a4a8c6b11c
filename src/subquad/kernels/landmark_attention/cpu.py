"""Landmark attention on the CPU, made of torch's own products, by tiles of time.

Landmarks are few; what has the length of the sequence is A, t, a and W. Work goes by tiles of time, whose part of each
of these fits the cache, for one head, or for as many heads and sequences as a tile has room for. Training keeps them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.landmark_attention import LEAST_WEIGHT, Focus
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.parallel import parallel_map

TILE_ELEMENTS = 2**18
"""Entries of a tile's matrix (landmarks, time): 1 MiB in float32. Larger tiles leave the cache, smaller cost calls."""

DTYPES = (torch.float32, torch.float64)


def landmark_attention(
    qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, focus: Focus | None, mask: Tensor | None
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    small = (w_keys, w_queries, shared, *((None, None) if focus is None else focus[:2]))
    share, alpha = (None, 0.0) if focus is None else (focus.share.expand(qkv.shape[0], -1), focus.alpha)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (qkv, *small))
    return torch.ops.subquad.landmark_attention(qkv, *small, share, mask, alpha, trains)[0]


# ---------------------------------------------------------------------- groups and tiles


class Tile(NamedTuple):
    """Some positions in time, of n heads.

    A (n, c, t); W, and with a focus t below it, (n, 2c, t); a (n, c, t), which is infinite where it is at its least, so
    that no gradient flows through what is divided by it.
    """

    time: slice
    chances: Tensor
    by_query: Tensor
    weights: Tensor | None


class Group:
    """Some heads of a sequence, or all heads of some sequences: n heads, which products treat as one batch."""

    def __init__(self, rows: slice, heads: slice, valid: Tensor | None) -> None:
        self.rows, self.heads = rows, heads
        self.across = heads.stop - heads.start
        self.size = (rows.stop - rows.start) * self.across
        self.hidden = None if valid is None else ~valid[rows].repeat_interleave(self.across, 0)[:, None]

    def pack(self, x: Tensor, time: slice) -> Tensor:
        """Of x (batch, time, heads, d): (n, t, d).

        A copy: products of rows that lie a whole projection apart take longer than copy and product together.
        """
        return x[self.rows, time, self.heads].transpose(1, 2).contiguous().flatten(0, 1)

    def place(self, x: Tensor, time: slice, values: Tensor) -> None:
        """Writes values (n, t, d) to where `pack` reads."""
        x[self.rows, time, self.heads] = values.unflatten(0, (-1, self.across)).transpose(1, 2)

    def of(self, x: Tensor) -> Tensor:
        """Of x (batch, heads, c, ...): (n, c, ...)."""
        return x[self.rows, self.heads].flatten(0, 1)

    def set(self, x: Tensor, values: Tensor) -> None:
        x[self.rows, self.heads] = values.unflatten(0, (-1, self.across))

    def share(self, share: Tensor) -> Tensor:
        return share[self.rows].repeat_interleave(self.across, 0)[..., None]

    def hide_(self, x: Tensor, time: slice, value: float) -> Tensor:
        return x if self.hidden is None else x.masked_fill_(self.hidden[..., time], value)


class Cutting:
    """What forward and backward share: groups of heads, tiles of time, and where each tile is kept."""

    def __init__(self, qkv: Tensor, w: Tensor, focused: bool, valid: Tensor | None) -> None:
        self.batch, self.time, _, self.heads, width = qkv.shape
        self.landmarks, self.focused, self.valid = w.shape[2], focused, valid
        self.scale = width**-0.5
        self.matrices = 4 if focused else 2

    def kept(self) -> int:
        return self.batch * self.heads * self.matrices * self.landmarks * self.time

    def groups(self) -> list[Group]:
        most = max(1, TILE_ELEMENTS // (self.landmarks * self.time))
        if most < self.heads:
            starts = [(row, head) for row in range(self.batch) for head in range(0, self.heads, most)]
            return [
                Group(slice(row, row + 1), slice(head, min(head + most, self.heads)), self.valid)
                for row, head in starts
            ]
        rows = most // self.heads
        return [
            Group(slice(row, min(row + rows, self.batch)), slice(0, self.heads), self.valid)
            for row in range(0, self.batch, rows)
        ]

    def tiles(self, group: Group, kept: Tensor) -> list[Tile]:
        """Views of `kept`, in which a tile's matrices lie together: rows a whole length apart would share cache sets.

        kept has room for all groups, one after the other, or just for this one.
        """
        c, n = self.landmarks, group.size
        length = max(1, TILE_ELEMENTS // c)
        before = group.rows.start * self.heads + group.heads.start if kept.numel() == self.kept() else 0
        begin = before * self.matrices * c * self.time
        tiles = []
        for start in range(0, self.time, length):
            t = min(length, self.time - start)
            sizes = [n * c * t] * 2 if not self.focused else [n * c * t, n * 2 * c * t, n * c * t]
            parts = kept[begin : begin + sum(sizes)].split(sizes)
            begin += sum(sizes)
            chances, by_query, *weights = (part.view(n, -1, t) for part in parts)
            tiles.append(Tile(slice(start, start + t), chances, by_query, weights[0] if weights else None))
        return tiles


# ---------------------------------------------------------------------- forward


def _softmax_(logits: list[Tensor]) -> Tensor:
    """Overwrites logits, cut into tiles (n, c, t), by their softmax over all tiles; returns their LSE (n, c, 1)."""
    tops = torch.stack([part.amax(-1, keepdim=True) for part in logits])
    largest = tops.amax(0)
    total = torch.stack([part.sub_(largest).exp_().sum(-1, keepdim=True) for part in logits]).sum(0)
    for part in logits:
        part.div_(total)
    return largest + total.log()


def _sum_up_keys(qkv: Tensor, w: Tensor, group: Group, tiles: list[Tile]) -> tuple[Tensor, Tensor]:
    """u (n, c, d) and LSE_j l (n, c, 1); fills `chances`. w: s w (n, c, d)."""
    scale, u = qkv.shape[-1] ** -0.5, torch.zeros_like(w)
    for tile in tiles:
        k = group.pack(qkv[:, :, 1], tile.time)
        logits = torch.bmm(w, k.transpose(1, 2), out=tile.chances)
        logits -= torch.linalg.vecdot(k, k).mul_(scale / 2)[:, None]
        group.hide_(logits, tile.time, MASK_VALUE)
    mass = _softmax_([tile.chances for tile in tiles])
    for tile in tiles:
        u.baddbmm_(tile.chances, group.pack(qkv[:, :, 2], tile.time))
    return u, mass


@torch.library.custom_op("subquad::landmark_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    w_keys: Tensor,
    w_queries: Tensor,
    shared: Tensor,
    directions: Tensor | None,
    balance: Tensor | None,
    share: Tensor | None,
    valid: Tensor | None,
    alpha: float,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, u, and what tiles keep (empty unless training)."""
    cutting = Cutting(qkv, w_keys, directions is not None, valid)
    y = qkv.new_empty(qkv.shape[0], qkv.shape[1], *qkv.shape[3:])
    u = torch.empty_like(w_keys, memory_format=torch.contiguous_format)
    kept = qkv.new_empty(cutting.kept() if trains else 0)
    c, scale = cutting.landmarks, cutting.scale
    both = w_queries if directions is None else torch.cat([w_queries, directions], 2)

    def mix(group: Group) -> None:
        room = kept if trains else qkv.new_empty(group.size * cutting.matrices * c * cutting.time)
        tiles = cutting.tiles(group, room)
        group_u, mass = _sum_up_keys(qkv, group.of(w_keys) * scale, group, tiles)
        group.set(u, group_u)
        offset, group_both = group.of(shared) + mass, group.of(both) * scale
        for tile in tiles:
            torch.bmm(group_both, group.pack(qkv[:, :, 0], tile.time).transpose(1, 2), out=tile.by_query)
            group.hide_(tile.by_query[:, c:], tile.time, MASK_VALUE)
        if directions is not None:
            _softmax_([tile.by_query[:, c:] for tile in tiles])
        for tile in tiles:
            chances = tile.by_query[:, :c].add_(offset)
            chances.sub_(chances.amax(1, keepdim=True)).exp_()
            if balance is not None and share is not None and tile.weights is not None:
                focus, weights = tile.by_query[:, c:], tile.weights
                torch.sub(focus, torch.bmm(group.share(share).transpose(1, 2), focus), out=weights)
                torch.add(group.of(balance), weights, alpha=alpha, out=weights)
                chances.mul_(weights.clamp_(min=LEAST_WEIGHT))
                F.threshold(weights, LEAST_WEIGHT, torch.inf, inplace=True)
            chances.div_(chances.sum(1, keepdim=True))
            group.place(y, tile.time, torch.bmm(chances.transpose(1, 2), group_u))

    list(parallel_map(mix, cutting.groups()))
    return y, u, kept


# ---------------------------------------------------------------------- backward


def _unweigh(
    grad: Tensor, u: Tensor, share: Tensor | None, alpha: float, group: Group, tiles: list[Tile]
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """From the gradient of y to those of the logits by query, s w'.q and s f.q below it, each (n, c or 2c, t).

    Also the gradients of u (n, c, d), of b, and of beta, both (n, c, 1).
    """
    c = u.shape[1]
    d_u, d_by_query = torch.zeros_like(u), []
    d_shared, d_balance, mean = u.new_zeros(3, *u.shape[:2], 1).unbind()
    for tile in tiles:
        g, chances, d_both = group.pack(grad, tile.time), tile.by_query[:, :c], torch.empty_like(tile.by_query)
        d_logits = d_both[:, :c]
        d_by_query.append(d_both)
        d_u.baddbmm_(chances, g)
        torch.mul(torch.bmm(u, g.transpose(1, 2)), chances, out=d_logits)
        d_logits.addcmul_(chances, d_logits.sum(1, keepdim=True), value=-1)
        d_shared += d_logits.sum(-1, keepdim=True)
        if share is not None and tile.weights is not None:
            d_weights = torch.div(d_logits, tile.weights, out=d_both[:, c:])
            d_balance += d_weights.sum(-1, keepdim=True)
            d_weights.addcmul_(share, d_weights.sum(1, keepdim=True), value=-1).mul_(tile.by_query[:, c:])
            mean += d_weights.sum(-1, keepdim=True)
    if share is not None:
        for tile, d_both in zip(tiles, d_by_query, strict=True):
            # what is hidden has t = 0, unless nothing else is there
            d_focus = d_both[:, c:].addcmul_(tile.by_query[:, c:], mean, value=-1).mul_(alpha)
            group.hide_(d_focus, tile.time, 0)
    return d_by_query, d_u, d_shared, d_balance


def _through_keys(
    qkv: Tensor, w: Tensor, d_u: Tensor, constant: Tensor, d_qkv: Tensor, group: Group, tiles: list[Tile]
) -> Tensor:
    """Writes the gradients of k and v; returns that of w, before its factor s. w: s w (n, c, d).

    dl = A (v.du + constant), where constant (n, c, 1) is the gradient of LSE_j l, minus u.du.
    """
    scale, d_w = qkv.shape[-1] ** -0.5, torch.zeros_like(w)
    for tile in tiles:
        k, v = group.pack(qkv[:, :, 1], tile.time), group.pack(qkv[:, :, 2], tile.time)
        d_logits = torch.bmm(d_u, v.transpose(1, 2)).add_(constant).mul_(tile.chances)
        group.hide_(d_logits, tile.time, 0)
        d_k = torch.bmm(d_logits.transpose(1, 2), w)
        d_k.addcmul_(k, d_logits.sum(1)[..., None], value=-scale)
        d_w.baddbmm_(d_logits, k)
        group.place(d_qkv[:, :, 1], tile.time, d_k)
        group.place(d_qkv[:, :, 2], tile.time, torch.bmm(tile.chances.transpose(1, 2), d_u))
    return d_w


@torch.library.custom_op("subquad::landmark_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    u: Tensor,
    kept: Tensor,
    qkv: Tensor,
    w_keys: Tensor,
    w_queries: Tensor,
    shared: Tensor,
    directions: Tensor | None,
    balance: Tensor | None,
    share: Tensor | None,
    valid: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkv, w, w', b, f and beta; those of what is absent are empty."""
    d_qkv, *d_small = _like(qkv, w_keys, w_queries, shared, directions, balance)
    cutting = Cutting(qkv, w_keys, directions is not None, valid)
    c, scale = cutting.landmarks, cutting.scale
    both = w_queries if directions is None else torch.cat([w_queries, directions], 2)

    def differentiate(group: Group) -> None:
        tiles, group_u, group_both = cutting.tiles(group, kept), group.of(u), group.of(both) * scale
        group_share = None if share is None else group.share(share)
        d_by_query, d_u, d_shared, d_balance = _unweigh(grad, group_u, group_share, alpha, group, tiles)
        d_both = torch.zeros_like(group_both)
        for tile, d_logits in zip(tiles, d_by_query, strict=True):
            group.place(d_qkv[:, :, 0], tile.time, torch.bmm(d_logits.transpose(1, 2), group_both))
            d_both.baddbmm_(d_logits, group.pack(qkv[:, :, 0], tile.time))
        constant = d_shared - (group_u * d_u).sum(-1, keepdim=True)
        d_w = _through_keys(qkv, group.of(w_keys) * scale, d_u, constant, d_qkv, group, tiles)
        d_both.mul_(scale)
        parts = (d_w.mul_(scale), d_both[:, :c], d_shared, d_both[:, c:], d_balance)
        for whole, part in zip(d_small[: 3 if directions is None else 5], parts, strict=False):
            group.set(whole, part)

    list(parallel_map(differentiate, cutting.groups()))
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
    room = Cutting(qkv, w_keys, others[2] is not None, None).kept() if others[-1] else 0
    return y, _like(w_keys)[0], qkv.new_empty(room)


@_backward.register_fake
def _fake_backward(grad: Tensor, u: Tensor, kept: Tensor, *inputs: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(_like(*inputs[:6]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.alpha = inputs[8]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 10
    u, kept, *inputs = ctx.saved_tensors
    gradients = torch.ops.subquad.landmark_attention_backward(grad, u, kept, *inputs, ctx.alpha)
    present = (None if t is None else gradient for t, gradient in zip(inputs[:6], gradients, strict=True))
    return (*present, *(None,) * 4)


_forward.register_autograd(_differentiate, setup_context=_remember)
