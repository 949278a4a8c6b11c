"""Window attention in plain torch: the definition, for sequences and grids, in every precision and on every device."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32
from subquad.kernels.window_attention import Summaries, Windows


def window_attention(
    qkv: Tensor,
    windows: Windows,
    bias: Tensor | None,
    mask: Tensor | None,
    summaries: Summaries | None,
    dropout: float,
) -> Tensor:
    """y (batch, N, heads, d); see the public function."""
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    q, k, v, mask = in_windows(q, k, v, windows, mask)
    logits = window_logits(q, k, windows, bias, mask)
    if summaries is None:
        y = F.dropout(logits.softmax(-1).to(v.dtype), dropout) @ v
    else:
        beyond = summary_logits(q.flatten(2, 3), summaries).unflatten(2, q.shape[2:4])
        joint = F.dropout(torch.cat([logits, beyond], -1).softmax(-1).to(v.dtype), dropout)
        probs, summary_probs = joint.split([logits.shape[-1], beyond.shape[-1]], -1)
        y = probs @ v + (summary_probs.flatten(2, 3) @ summaries.v).view_as(q)
    return merge_windows(y, windows).transpose(1, 2)


def window_logits(q: Tensor, k: Tensor, windows: Windows, bias: Tensor | None, mask: Tensor) -> Tensor:
    """s q_i.k_j + b(i, j) of queries (batch, heads, windows, cells, d) and the keys (.., keys, d) of their windows.

    mask: (batch or 1, 1, windows, keys) bool, False for cells outside the sequence or grid and for those that are no
    keys. Returns (batch, heads, windows, cells, keys) in float32, or in float64 when q is.
    """
    logits = at_least_float32((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2))
    if bias is not None:
        logits = logits + bias[:, None]
    mask = mask.unsqueeze(-2)
    if windows.causal:
        last = torch.arange(q.shape[-2], device=q.device)[:, None] + windows.look_back
        mask = mask & (torch.arange(k.shape[-2], device=q.device) <= last)
    return keep(logits, mask)


def summary_logits(q: Tensor, summaries: Summaries) -> Tensor:
    """s q_i.f_c of queries (batch, heads, N, d), the first of which begins the sequence: (batch, heads, N, n)."""
    logits = at_least_float32((q * q.shape[-1] ** -0.5) @ summaries.k.transpose(-1, -2))
    if not isinstance(summaries.chunk, int) or summaries.chunk:
        chunk_of_query = torch.arange(q.shape[2], device=q.device) // summaries.chunk
        seen = torch.arange(summaries.k.shape[2], device=q.device) < chunk_of_query[..., None]
        logits = keep(logits, seen.view(-1, 1, *seen.shape[-2:]))
    return logits if summaries.mask is None else keep(logits, summaries.mask[:, None, None, :])


# ---------------------------------------------------------------------- windows of sequences and grids


def in_windows(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (batch, heads, N, d) and the mask (batch or 1, N) of keys, by windows; None: all positions are keys.

    Returns q (batch, heads, windows, cells, d), k and v (.., keys, d), and the mask (batch or 1, 1, windows, keys).
    """
    shape, look = windows.shape, (windows.look_back, windows.look_forward)
    counts = tuple(cells // windows.size for cells in shape)
    if mask is None:
        mask = torch.ones((1, q.shape[2]), dtype=torch.bool, device=q.device)
    by_cell = mask.unflatten(1, shape).unsqueeze(1).unsqueeze(-1)
    q = partition(q.unflatten(2, shape), windows.size, (0, 0), counts)
    k, v = (partition(part.unflatten(2, shape), windows.size, look, counts) for part in (k, v))
    return q, k, v, partition(by_cell, windows.size, look, counts).squeeze(-1)


def partition(x: Tensor, size: int, look: tuple[int, int], counts: Sequence[int]) -> Tensor:
    """Windows of `size` cells along each axis, and the cells that they look back and forward to on either side.

    x: (batch, heads, *shape, width) -> (batch, heads, windows, cells, width); counts: windows along each axis. What
    lies outside the shape is 0.
    """
    look_back, look_forward = look
    if len(counts) == 1 and tracing.is_symbolic(counts[0]):
        return _gather_windows(x, size, look, counts[0])
    pads = [0, 0]
    for axis in reversed(range(len(counts))):
        pads += [look_back, counts[axis] * size + look_forward - x.shape[2 + axis]]
    if any(pads):
        x = F.pad(x, pads)
    for axis in range(len(counts)):
        x = x.unfold(2 + axis, look_back + size + look_forward, size)
    return x.flatten(2, 1 + len(counts)).flatten(4).transpose(-1, -2)


def _gather_windows(x: Tensor, size: int, look: tuple[int, int], count: int) -> Tensor:
    """`partition` of a sequence of any length: what torch knows about views of it holds for some lengths only."""
    look_back, look_forward = look
    padded = F.pad(x, (0, 0, look_back, count * size + look_forward - x.shape[2]))
    first = torch.arange(count, device=x.device)[:, None] * size
    position = first + torch.arange(look_back + size + look_forward, device=x.device)
    return padded.index_select(2, position.flatten()).unflatten(2, tuple(position.shape))


def merge_windows(y: Tensor, windows: Windows) -> Tensor:
    """The inverse of `partition` for queries: (batch, heads, windows, cells, width) -> (batch, heads, N, width)."""
    size, shape = windows.size, windows.shape
    if len(shape) == 2:
        rows, columns = (cells // size for cells in shape)
        y = y.unflatten(3, (size, size)).unflatten(2, (rows, columns)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return y.flatten(2, 3)
