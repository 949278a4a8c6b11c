"""Values of chunks on the CPU, made of torch's own operations.

A head at a time on each thread, so that what lies between keys and result stays in the cache; training keeps the
probabilities.
"""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.parallel import for_each

DTYPES = (torch.float32, torch.float64)


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    """u (batch, heads, chunks, d); see the public function."""
    trains = torch.is_grad_enabled() and (qkv.requires_grad or w.requires_grad)
    return torch.ops.subquad.chunk_values(qkv, w, mask, trains)[0]


def _of_head(qkv: Tensor, head: int, chunks: int) -> tuple[Tensor, Tensor]:
    """k, v of a head: (batch, chunks, cells, d), contiguous."""
    k, v = (qkv[:, :, part, head].contiguous().unflatten(1, (chunks, -1)) for part in (1, 2))
    return k, v


@torch.library.custom_op("subquad::chunk_values", mutates_args=())
def _forward(qkv: Tensor, w: Tensor, tokens: Tensor | None, trains: bool) -> tuple[Tensor, Tensor]:
    """u, and the probabilities (heads, batch, chunks, cells), which are empty unless training."""
    chunks, scale = w.shape[2], qkv.shape[-1] ** -0.5
    u = torch.empty_like(w, memory_format=torch.contiguous_format)
    kept = qkv.new_empty(_kept_shape(qkv, w, trains))
    there = None if tokens is None else tokens.unflatten(1, (chunks, -1))

    def summarise(head: int) -> None:
        k, v = _of_head(qkv, head, chunks)
        logits = (k * (w[:, head, :, None] - k / 2)).sum(-1).mul_(scale)
        if there is not None:
            logits.masked_fill_(~there, MASK_VALUE)
        chances = torch.softmax(logits, -1)
        if there is not None:
            chances *= there
        if trains:
            kept[head] = chances
        u[:, head] = (chances[..., None] * v).sum(-2)

    for_each(summarise, range(qkv.shape[3]))
    return u, kept


@torch.library.custom_op("subquad::chunk_values_backward", mutates_args=())
def _backward(grad: Tensor, kept: Tensor, qkv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of qkv and w."""
    scale, chunks = qkv.shape[-1] ** -0.5, w.shape[2]
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_w = torch.empty_like(w, memory_format=torch.contiguous_format)
    d_qkv[:, :, 0].zero_()

    def differentiate(head: int) -> None:
        k, v = _of_head(qkv, head, chunks)
        chances, g = kept[head], grad[:, head, :, None]
        d_logits = torch._softmax_backward_data((v * g).sum(-1), chances, -1, chances.dtype).mul_(scale)
        d_w[:, head] = (d_logits[..., None] * k).sum(-2)
        d_qkv[:, :, 1, head] = ((w[:, head, :, None] - k) * d_logits[..., None]).flatten(1, 2)
        d_qkv[:, :, 2, head] = (chances[..., None] * g).flatten(1, 2)

    for_each(differentiate, range(qkv.shape[3]))
    return d_qkv, d_w


def _kept_shape(qkv: Tensor, w: Tensor, trains: bool) -> tuple[int, ...]:
    chunks = w.shape[2]
    return (qkv.shape[3], qkv.shape[0], chunks, qkv.shape[1] // chunks) if trains else (0,)


@_forward.register_fake
def _fake_forward(qkv: Tensor, w: Tensor, tokens: Tensor | None, trains: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(w, memory_format=torch.contiguous_format), qkv.new_empty(_kept_shape(qkv, w, trains))


@_backward.register_fake
def _fake_backward(grad: Tensor, kept: Tensor, qkv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return d_qkv, torch.empty_like(w, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[0], inputs[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on u
        return (None,) * 4
    return (*torch.ops.subquad.chunk_values_backward(grad, *ctx.saved_tensors), None, None)


_forward.register_autograd(_differentiate, setup_context=_remember)
