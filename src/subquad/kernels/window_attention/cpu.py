"""Window attention of sequences on the CPU, made of torch's own products, without a matrix of the whole.

Heads are spread over threads. Within one, work goes by tiles: some windows, whose logits fit the cache. Per tile there
is one batched product for the logits and one for the values, with the summaries beside the keys of each window.
Training keeps the probabilities.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.kernels import tracing
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.parallel import parallel_map
from subquad.kernels.tiles import cut
from subquad.kernels.window_attention import Summaries, Windows, reference

TILE_ELEMENTS = 2**20
"""Logits of a tile: 4 MiB in float32. Larger tiles leave the cache, smaller ones cost calls."""

DTYPES = (torch.float32, torch.float64)
LACKS = ("grids", "dropout", "chunks of a size for each row")


def window_attention(
    qkv: Tensor,
    windows: Windows,
    bias: Tensor | None,
    mask: Tensor | None,
    summaries: Summaries | None,
    dropout: float,  # noqa: ARG001 - always 0: see LACKS
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    if tracing.may_branch_on_length() and windows.shape[0] == windows.size:
        return _attend_in_one_window(qkv, windows, bias, mask, summaries)
    summary_k, summary_v, summary_mask, chunk = (None, None, None, 0) if summaries is None else summaries
    inputs = (qkv, summary_k, summary_v, bias)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    sizes = (windows.size, windows.look_back, windows.look_forward, windows.causal, chunk)
    return torch.ops.subquad.window_attention(*inputs, mask, summary_mask, *sizes, trains)[0]


def _attend_in_one_window(
    qkv: Tensor, windows: Windows, bias: Tensor | None, mask: Tensor | None, summaries: Summaries | None
) -> Tensor:
    """y (batch, time, heads, d) where every query sees all tokens, or all before it: torch's own attention.

    For short sequences the calls of a tile for each head cost more than what they compute.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    time, visible = qkv.shape[1], None if mask is None else mask[:, None, None]
    if windows.causal and not (visible is None and bias is None and summaries is None):
        earlier = torch.ones(time, time, dtype=torch.bool, device=qkv.device).tril()
        visible = earlier if visible is None else visible & earlier
    if summaries is not None:
        k, v = torch.cat([k, summaries.k], 2), torch.cat([v, summaries.v], 2)
        visible = _join(visible, _visible_summaries(summaries, time), time, summaries.k.shape[2])
    hidden = None if visible is None else q.new_zeros(()).expand_as(visible).masked_fill(~visible, MASK_VALUE)
    if bias is None:
        y: Tensor = FusedAttention.apply(q, k, v, hidden, windows.causal and visible is None)
    else:
        bias = F.pad(bias[:, :, windows.look_back : windows.look_back + time], (0, k.shape[2] - time))
        y = F.scaled_dot_product_attention(q, k, v, bias if hidden is None else bias + hidden)
    return y.transpose(1, 2)


class FusedAttention(torch.autograd.Function):
    """torch's fused attention on CPUs; a backward pass that is differentiated itself goes through plain products.

    q (batch, heads, queries, d); k, v (batch, heads, keys, d); hidden: what is added to the logits, or None; causal:
    whether keys after the query are hidden.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool) -> Tensor:
        y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=hidden)
        ctx.save_for_backward(q, k, v, hidden, y, log_sums)
        ctx.causal = causal
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, hidden, y, log_sums = ctx.saved_tensors
        if tracing.differentiates_backward():

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(SDPBackend.MATH):
                    return F.scaled_dot_product_attention(q, k, v, hidden, is_causal=ctx.causal)

            return *tracing.gradients_of(attend, (q, k, v), grad), None, None
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return *backward(grad, q, k, v, y, log_sums, 0.0, ctx.causal, attn_mask=hidden), None, None


def _visible_summaries(summaries: Summaries, time: int) -> Tensor | None:
    """Which summaries the queries see: (batch or 1, 1, time or 1, n) bool; None: all see all."""
    visible = None if summaries.mask is None else summaries.mask[:, None, None]
    if summaries.chunk:
        count, device = summaries.k.shape[2], summaries.k.device
        ended = torch.arange(time, device=device)[:, None] // summaries.chunk > torch.arange(count, device=device)
        visible = ended if visible is None else visible & ended
    return visible


def _join(keys: Tensor | None, summaries: Tensor | None, time: int, count: int) -> Tensor | None:
    """One mask (batch or 1, 1, time, time + count) of keys and summaries; None: all are visible."""
    if keys is None and summaries is None:
        return None
    parts = [(keys, time), (summaries, count)]
    known = [part for part, _ in parts if part is not None]
    batch = max(part.shape[0] if part.dim() == 4 else 1 for part in known)
    ones = known[0].new_ones(())
    return torch.cat([(ones if part is None else part).expand(batch, 1, time, n) for part, n in parts], -1)


class Shape(NamedTuple):
    """How queries, keys and summaries relate."""

    window: int
    before: int
    after: int
    causal: bool
    chunk: int

    @property
    def keys(self) -> int:
        return self.before + self.window + self.after


class WindowTile(NamedTuple):
    """Some windows of one sequence, or all windows of some sequences; and how many summaries its last query sees."""

    rows: slice
    windows: slice
    summaries: int


class Tiling:
    """What forward and backward share: the tiles of a head, and which logits are hidden in them."""

    def __init__(self, qkv: Tensor, summary_k: Tensor | None, shape: Shape) -> None:
        self.shape, self.device = shape, qkv.device
        self.batch, time, _, self.heads, self.width = qkv.shape
        self.scale = self.width**-0.5
        self.windows = time // shape.window
        self.summaries = 0 if summary_k is None else summary_k.shape[2]

    def __iter__(self) -> Iterator[WindowTile]:
        shape = self.shape
        logits = shape.window * (shape.keys + self.summaries)
        for rows, windows in cut(self.batch, self.windows, logits, TILE_ELEMENTS):
            seen = (windows.stop * shape.window - 1) // shape.chunk if shape.chunk else self.summaries
            whole = windows.stop - windows.start == self.windows
            yield WindowTile(rows, windows, self.summaries if whole else min(seen, self.summaries))

    def kept(self) -> tuple[int, int]:
        """Room for the probabilities of all tiles of each head. Where tiles see fewer summaries, less is used."""
        return self.heads, self.batch * self.windows * self.shape.window * (self.shape.keys + self.summaries)

    def hide(self, logits: Tensor, tile: WindowTile, mask: Tensor | None, summary_mask: Tensor | None) -> None:
        """Hides masked, later and unseen keys in logits (rows, windows, w, keys + summaries)."""
        shape = self.shape
        local, summary = logits[..., : shape.keys], logits[..., shape.keys :]
        if mask is not None:
            mask_of_keys = F.pad(mask, (shape.before, shape.after)).unfold(1, shape.keys, shape.window)
            local.masked_fill_(~_rows(mask_of_keys, tile)[:, tile.windows, None], MASK_VALUE)
        else:
            self._hide_outside(local, tile)
        if shape.causal:
            place = torch.arange(shape.window, device=self.device)[:, None] + shape.before
            local.masked_fill_(torch.arange(shape.keys, device=self.device) > place, MASK_VALUE)
        if tile.summaries and shape.chunk:
            # only the chunks that end within the tile are seen by some of its queries and not by others
            begin, end = tile.windows.start * shape.window, tile.windows.stop * shape.window
            new = begin // shape.chunk
            current = torch.arange(begin, end, device=self.device)[:, None] // shape.chunk
            unseen = torch.arange(new, tile.summaries, device=self.device) >= current
            summary[..., new:].masked_fill_(unseen.unflatten(0, (-1, shape.window)), MASK_VALUE)
        if tile.summaries and summary_mask is not None:
            summary.masked_fill_(~_rows(summary_mask, tile)[:, None, None, : tile.summaries], MASK_VALUE)

    def _hide_outside(self, local: Tensor, tile: WindowTile) -> None:
        """Keys before the sequence and after it, which only the outermost windows reach."""
        shape = self.shape
        for number, window in enumerate(range(tile.windows.start, tile.windows.stop)):
            start = window * shape.window - shape.before
            beyond = start + shape.keys - self.windows * shape.window
            if start < 0:
                local[:, number, :, :-start] = MASK_VALUE
            if beyond > 0:
                local[:, number, :, shape.keys - beyond :] = MASK_VALUE


def _rows(x: Tensor, tile: WindowTile) -> Tensor:
    """The tile's rows of (batch or 1, ...)."""
    return x if x.shape[0] == 1 else x[tile.rows]


def _by_window(x: Tensor, tile: WindowTile, shape: Shape) -> Tensor:
    """The tile's windows of x (batch, time, d), without reach: (rows, windows, window, d), a view."""
    return x[tile.rows].unflatten(1, (-1, shape.window))[:, tile.windows]


def _reachable(x: Tensor, tile: WindowTile, shape: Shape, summaries: Tensor | None) -> Tensor:
    """Keys (or values) of a tile: (rows * windows, keys + summaries, d).

    x: (batch, before + time + after, d), of which windows reach parts; summaries: (batch, n, d), beside all of them.
    """
    local = x[tile.rows].unfold(1, shape.keys, shape.window).transpose(2, 3)[:, tile.windows]
    if summaries is not None and tile.summaries:
        summary = summaries[tile.rows, None, : tile.summaries].expand(-1, local.shape[1], -1, -1)
        local = torch.cat([local, summary], 2)
    return local.flatten(0, 1)


def _add_reachable(total: Tensor, windows: Tensor, tile: WindowTile, shape: Shape) -> None:
    """Transposes `_reachable` of windows: adds (rows, windows, keys, d) to (batch, before + time + after, d)."""
    # Windows stand a window apart, so pieces of at most that length can be added to all of them at once.
    for begin in range(0, shape.keys, shape.window):
        length = min(shape.window, shape.keys - begin)
        start = tile.windows.start * shape.window + begin
        part = total[tile.rows, start : start + (windows.shape[1] - 1) * shape.window + length]
        part.unfold(1, length, shape.window).transpose(2, 3).add_(windows[:, :, begin : begin + length])


def _packed(qkv: Tensor, head: int, shape: Shape) -> list[Tensor]:
    """q (batch, time, d) and k, v (batch, before + time + after, d) of a head.

    Copies: products of rows that lie a whole projection apart run at half the speed.
    """
    q, k, v = (qkv[:, :, part, head] for part in range(3))
    if not (shape.before or shape.after):
        return [q.contiguous(), k.contiguous(), v.contiguous()]
    return [q.contiguous(), *(F.pad(part, (0, 0, shape.before, shape.after)) for part in (k, v))]


def _of_head(summaries: Tensor | None, head: int) -> Tensor | None:
    return None if summaries is None else summaries[:, head]


@torch.library.custom_op("subquad::window_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    summary_k: Tensor | None,
    summary_v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    summary_mask: Tensor | None,
    window: int,
    before: int,
    after: int,
    causal: bool,
    chunk: int,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """y, and the probabilities of all tiles, one after the other (empty unless training)."""
    shape = Shape(window, before, after, causal, chunk)
    tiling = Tiling(qkv, summary_k, shape)
    y = qkv.new_empty(qkv.shape[0], qkv.shape[1], tiling.heads, tiling.width)
    kept = qkv.new_empty(tiling.kept() if trains else 0)

    def mix(head: int) -> None:
        done = 0
        q, k, v = _packed(qkv, head, shape)
        q = q * tiling.scale  # not in place: a copy that was not needed is the input itself
        for tile in tiling:
            tile_q = _by_window(q, tile, shape)
            logits = torch.bmm(
                tile_q.flatten(0, 1), _reachable(k, tile, shape, _of_head(summary_k, head)).transpose(1, 2)
            )
            by_row = logits.unflatten(0, tile_q.shape[:2])
            if bias is not None:
                by_row[..., : shape.keys] += bias[min(head, bias.shape[0] - 1)]
            tiling.hide(by_row, tile, mask, summary_mask)
            probs = kept[head, done : done + logits.numel()].view_as(logits) if trains else logits
            torch.softmax(logits, -1, out=probs)
            done += logits.numel()
            mixed = torch.bmm(probs, _reachable(v, tile, shape, _of_head(summary_v, head)))
            _by_window(y[:, :, head], tile, shape).copy_(mixed.view_as(tile_q))

    list(parallel_map(mix, range(tiling.heads)))
    return y, kept


@torch.library.custom_op("subquad::window_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    kept: Tensor,
    qkv: Tensor,
    summary_k: Tensor | None,
    summary_v: Tensor | None,
    bias: Tensor | None,
    window: int,
    before: int,
    after: int,
    causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkv, summary_k, summary_v and bias; those of what is absent are empty."""
    shape = Shape(window, before, after, causal, chunk)
    tiling = Tiling(qkv, summary_k, shape)
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_summary_k, d_summary_v = (qkv.new_empty(0) if t is None else torch.zeros_like(t) for t in (summary_k, summary_v))
    d_bias = qkv.new_zeros((0,) if bias is None else (tiling.heads, *bias.shape[1:]))  # heads may share a bias
    inner = slice(before, before + qkv.shape[1])

    def differentiate(head: int) -> None:
        done = 0
        q, k, v = _packed(qkv, head, shape)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        for tile in tiling:
            tile_q = _by_window(q, tile, shape)
            shape_q, tile_q = tile_q.shape, tile_q.flatten(0, 1)
            tile_g = _by_window(grad[:, :, head], tile, shape).flatten(0, 1)
            tile_k = _reachable(k, tile, shape, _of_head(summary_k, head))
            tile_v = _reachable(v, tile, shape, _of_head(summary_v, head))
            count = tile_q.shape[0] * window * tile_k.shape[1]
            probs = kept[head, done : done + count].view(-1, window, tile_k.shape[1])
            done += count
            d_probs = torch.bmm(tile_g, tile_v.transpose(1, 2))
            d_logits = torch._softmax_backward_data(d_probs, probs, -1, probs.dtype).mul_(tiling.scale)
            _by_window(d_qkv[:, :, 0, head], tile, shape).copy_(torch.bmm(d_logits, tile_k).view(shape_q))
            tile_d_k = torch.bmm(d_logits.transpose(1, 2), tile_q).unflatten(0, shape_q[:2])
            tile_d_v = torch.bmm(probs.transpose(1, 2), tile_g).unflatten(0, shape_q[:2])
            _add_reachable(d_k, tile_d_k[:, :, : shape.keys], tile, shape)
            _add_reachable(d_v, tile_d_v[:, :, : shape.keys], tile, shape)
            if tile.summaries:
                d_summary_k[tile.rows, head, : tile.summaries] += tile_d_k[:, :, shape.keys :].sum(1)
                d_summary_v[tile.rows, head, : tile.summaries] += tile_d_v[:, :, shape.keys :].sum(1)
            if bias is not None:
                d_bias[head] += d_logits[..., : shape.keys].sum(0).div_(tiling.scale)
        d_qkv[:, :, 1, head].copy_(d_k[:, inner])
        d_qkv[:, :, 2, head].copy_(d_v[:, inner])

    list(parallel_map(differentiate, range(tiling.heads)))
    shared = bias is not None and bias.shape[0] < tiling.heads
    return d_qkv, d_summary_k, d_summary_v, d_bias.sum(0, keepdim=True) if shared else d_bias


@_forward.register_fake
def _fake_forward(qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    window, before, after, causal, chunk, trains = others[-6:]
    tiling = Tiling(qkv, others[0], Shape(window, before, after, causal, chunk))
    y = qkv.new_empty(tiling.batch, qkv.shape[1], tiling.heads, tiling.width)
    return y, qkv.new_empty(tiling.kept() if trains else 0)


@_backward.register_fake
def _fake_backward(
    grad: Tensor,  # noqa: ARG001
    kept: Tensor,  # noqa: ARG001
    qkv: Tensor,
    summary_k: Tensor | None,
    summary_v: Tensor | None,
    bias: Tensor | None,
    *sizes: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_summary_k, d_summary_v, d_bias = (
        qkv.new_empty(0) if t is None else torch.empty_like(t) for t in (summary_k, summary_v, bias)
    )
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), d_summary_k, d_summary_v, d_bias


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:6])
    ctx.sizes = inputs[6:11]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 12
    kept, *inputs, mask, summary_mask = ctx.saved_tensors
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, summary_k: Tensor | None, summary_v: Tensor | None, bias: Tensor | None) -> Tensor:
            size, before, after, causal, chunk = ctx.sizes
            windows = Windows((qkv.shape[1],), size, before, after, causal)
            summaries = None
            if summary_k is not None and summary_v is not None:
                summaries = Summaries(summary_k, summary_v, summary_mask, chunk)
            return reference.window_attention(qkv, windows, bias, mask, summaries, 0.0)

        return *tracing.gradients_of(attend, inputs, grad), *(None,) * 8
    gradients = torch.ops.subquad.window_attention_backward(grad, kept, *inputs, *ctx.sizes)
    present = (None if t is None else gradient for t, gradient in zip(inputs, gradients, strict=True))
    return (*present, *(None,) * 8)


_forward.register_autograd(_differentiate, setup_context=_remember)
