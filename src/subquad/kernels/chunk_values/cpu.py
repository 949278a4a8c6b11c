"""Values of chunks on the CPU, made of torch's own operations.

A head at a time on each thread, so that what lies between keys and result stays in the cache; all heads at once where
they are small, since calls then cost more than what they compute. Rows whose chunks have the same size are taken
together. Training keeps the probability of each position in its chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.chunk_values import reference
from subquad.kernels.chunk_values.reference import chunk_means as chunk_means
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.parallel import parallel_map

DTYPES = (torch.float32, torch.float64)
FEW_ELEMENTS = 2**19
"""Queries, keys and values of all heads that fit the cache: 2 MiB in float32."""


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None, size: int | Tensor) -> tuple[Tensor, Tensor]:
    """qkv, and u (batch, heads, chunks, d); see the public function."""
    trains = torch.is_grad_enabled() and (qkv.requires_grad or w.requires_grad)
    sizes, size = (size, 0) if isinstance(size, Tensor) else (None, size)
    return qkv, torch.ops.subquad.chunk_values(qkv, w, mask, sizes, size, trains)[0]


class Group(NamedTuple):
    """Rows of a batch with chunks of one size, of which the first `chunks` begin within the time."""

    rows: Tensor | slice
    size: int
    chunks: int

    def cells(self, x: Tensor) -> Tensor:
        """The rows of x (batch or 1, time, ...) by chunk: (rows or 1, chunks, size, ...), contiguous.

        Cells beyond the time are zeros, or False.
        """
        part = x[:, : self.chunks * self.size]
        part = part[self.rows] if x.shape[0] > 1 else part
        short = self.chunks * self.size - part.shape[1]
        if short:
            part = F.pad(part, (0, 0) * (x.dim() - 2) + (0, short))
        return part.contiguous().unflatten(1, (self.chunks, self.size))

    def put(self, target: Tensor, cells: Tensor) -> None:
        """The inverse of `cells`: writes (rows, chunks, size, ...) to a target (batch, time, ...)."""
        time = min(target.shape[1], self.chunks * self.size)
        target[self.rows, :time] = cells.flatten(1, 2)[:, :time]

    def chunk_vectors(self, x: Tensor, heads: slice) -> Tensor:
        """A vector of each chunk, of x (batch, heads, chunks, d): (rows, chunks, 1, heads, d), beside its cells."""
        return x[:, heads].transpose(1, 2)[self.rows, : self.chunks, None]

    def put_vectors(self, target: Tensor, heads: slice, vectors: Tensor) -> None:
        """Writes (rows, chunks, heads, d) to a target (batch, heads, chunks, d)."""
        target[:, heads].transpose(1, 2)[self.rows, : self.chunks] = vectors


def slices_of_heads(qkv: Tensor) -> list[slice]:
    """The heads that are computed together."""
    if qkv.numel() <= FEW_ELEMENTS:
        return [slice(None)]
    return [slice(head, head + 1) for head in range(qkv.shape[3])]


def groups_of(qkv: Tensor, w: Tensor, sizes: Tensor | None, size: int) -> list[Group]:
    if sizes is None:
        return [Group(slice(None), size, w.shape[2])]
    every = sizes.unique().tolist()
    chunks = [min(w.shape[2], -(-qkv.shape[1] // one)) for one in every]
    if len(every) == 1:
        return [Group(slice(None), every[0], chunks[0])]
    return [Group((sizes == one).nonzero().squeeze(1), one, count) for one, count in zip(every, chunks, strict=True)]


@torch.library.custom_op("subquad::chunk_values", mutates_args=())
def _forward(
    qkv: Tensor, w: Tensor, mask: Tensor | None, sizes: Tensor | None, size: int, trains: bool
) -> tuple[Tensor, Tensor]:
    """u, and the probabilities (heads, batch, time), which are empty unless training."""
    groups, scale = groups_of(qkv, w, sizes, size), qkv.shape[-1] ** -0.5
    u = torch.zeros_like(w, memory_format=torch.contiguous_format)
    kept = qkv.new_zeros(_kept_shape(qkv, trains))
    if mask is None and any(group.chunks * group.size > qkv.shape[1] for group in groups):
        mask = torch.ones(1, qkv.shape[1], dtype=torch.bool)
    masks = [None if mask is None else group.cells(mask) for group in groups]

    def summarise(heads: slice) -> None:
        for group, kept_cells in zip(groups, masks, strict=True):
            k, v = (group.cells(qkv[:, :, part, heads]) for part in (1, 2))
            logits = (k * (group.chunk_vectors(w, heads) - k / 2)).sum(-1).mul_(scale)
            if kept_cells is not None:
                logits.masked_fill_(~kept_cells[..., None], MASK_VALUE)
            probs = torch.softmax(logits, 2)
            if kept_cells is not None:
                probs *= kept_cells[..., None]
            if trains:
                group.put(kept[heads].permute(1, 2, 0), probs)
            group.put_vectors(u, heads, (probs[..., None] * v).sum(2))

    list(parallel_map(summarise, slices_of_heads(qkv)))
    return u, kept


@torch.library.custom_op("subquad::chunk_values_backward", mutates_args=())
def _backward(
    grad: Tensor, kept: Tensor, qkv: Tensor, w: Tensor, sizes: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv and w."""
    groups, scale = groups_of(qkv, w, sizes, size), qkv.shape[-1] ** -0.5
    d_qkv = torch.zeros_like(qkv, memory_format=torch.contiguous_format)
    d_w = torch.zeros_like(w, memory_format=torch.contiguous_format)

    def differentiate(heads: slice) -> None:
        for group in groups:
            k, v = (group.cells(qkv[:, :, part, heads]) for part in (1, 2))
            probs, g = group.cells(kept[heads].permute(1, 2, 0)), group.chunk_vectors(grad, heads)
            d_logits = torch._softmax_backward_data((v * g).sum(-1), probs, 2, probs.dtype).mul_(scale)[..., None]
            group.put_vectors(d_w, heads, (d_logits * k).sum(2))
            group.put(d_qkv[:, :, 1, heads], (group.chunk_vectors(w, heads) - k) * d_logits)
            group.put(d_qkv[:, :, 2, heads], probs[..., None] * g)

    list(parallel_map(differentiate, slices_of_heads(qkv)))
    return d_qkv, d_w


def _kept_shape(qkv: Tensor, trains: bool) -> tuple[int, ...]:
    return (qkv.shape[3], qkv.shape[0], qkv.shape[1]) if trains else (0,)


@_forward.register_fake
def _fake_forward(qkv: Tensor, w: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(w, memory_format=torch.contiguous_format), qkv.new_empty(_kept_shape(qkv, others[-1]))


@_backward.register_fake
def _fake_backward(grad: Tensor, kept: Tensor, qkv: Tensor, w: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return d_qkv, torch.empty_like(w, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, w, mask, sizes, ctx.size, _ = inputs
    ctx.save_for_backward(output[1], qkv, w, sizes, mask)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on u
        return (None,) * 6
    kept, qkv, w, sizes, mask = ctx.saved_tensors
    if tracing.differentiates_backward():
        size = ctx.size if sizes is None else sizes
        again = tracing.gradients_of(lambda qkv, w: reference.chunk_values(qkv, w, mask, size)[1], (qkv, w), grad)
        return (*again, *(None,) * 4)
    return (*torch.ops.subquad.chunk_values_backward(grad, kept, qkv, w, sizes, ctx.size), *(None,) * 4)


_forward.register_autograd(_differentiate, setup_context=_save)
