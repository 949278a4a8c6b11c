"""Values of chunks in plain torch: the definition, also for chunks that overlap or have sizes of their own."""

import torch
from torch import Tensor

from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32, full_precision
from subquad.kernels.window_attention.reference import partition


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None, size: int | Tensor) -> tuple[Tensor, Tensor]:
    """qkv, and u (batch, heads, chunks, d); see the public function."""
    k, v = (part.transpose(1, 2) for part in qkv.unbind(2)[1:])
    if isinstance(size, Tensor):
        return qkv, _values_of_members(k, v, w, members(size, w.shape[2], k.shape[2]), mask)
    if mask is None:
        mask = torch.ones((1, k.shape[2]), dtype=torch.bool, device=k.device)
    k, v, cells = (partition(part, size, (0, 0), (w.shape[2],)) for part in (k, v, mask[:, None, :, None]))
    return qkv, gathered_chunk_values(k, v, w, cells.squeeze(-1))


def chunk_means(qkv: Tensor, mask: Tensor | None, size: int | Tensor, divisors: Tensor) -> tuple[Tensor, ...]:
    """qkv, and the means of queries and of keys; see the public function."""
    size = size if isinstance(size, Tensor) else torch.full((1,), size, device=qkv.device)
    member = members(size, divisors.shape[1], qkv.shape[1])
    member = member if mask is None else member & mask[:, None, :]
    with full_precision(qkv):
        parts = at_least_float32(qkv[:, :, :2]).permute(2, 0, 3, 1, 4)
        sums = member[:, None].to(parts.dtype) @ parts
        return qkv, *(sums / divisors[:, None, :, None]).to(qkv.dtype).unbind(0)


def members(size: Tensor, chunks: int, time: int) -> Tensor:
    """Which of `time` positions belong to each of `chunks` chunks of size[b] positions: (batch, chunks, time) bool."""
    chunk = torch.arange(time, device=size.device) // size[:, None]
    return chunk[:, None, :] == torch.arange(chunks, device=size.device)[:, None]


def _values_of_members(k: Tensor, v: Tensor, w: Tensor, member: Tensor, mask: Tensor | None) -> Tensor:
    """Values of chunks as attention of w (batch, heads, chunks, d) to their members (batch, chunks, time)."""
    member = (member if mask is None else member & mask[:, None, :])[:, None]
    with full_precision(k):
        k32 = at_least_float32(k)
        direct = at_least_float32(w) @ k32.transpose(-1, -2)
        logits = k.shape[-1] ** -0.5 * (direct - k32.square().sum(-1).unsqueeze(-2) / 2)
        probs = (keep(logits, member).softmax(-1) * member).to(v.dtype)  # zeros in a chunk without members
    return probs @ v


def gathered_chunk_values(k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    """The same for chunks whose keys and values were brought together: k, v (batch, heads, chunks, cells, d).

    w: (batch, heads, chunks, d). mask: (batch or 1, 1, chunks, cells) bool, False for cells that stand for nothing.
    """
    with full_precision(k):
        k32 = at_least_float32(k)
        direct = (k32 @ at_least_float32(w).unsqueeze(-1)).squeeze(-1)
        logits = k.shape[-1] ** -0.5 * (direct - k32.square().sum(-1) / 2)
        probs = keep(logits, mask).softmax(-1)
        if mask is not None:
            probs = probs * mask  # in a chunk without cells all are alike
        probs = probs.to(v.dtype)
    return (probs.unsqueeze(-2) @ v).squeeze(-2)
