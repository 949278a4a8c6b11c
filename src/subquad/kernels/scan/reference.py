"""The causal scan in plain torch, by blocks of positions: the definition that the GPU kernel is held against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import tracing

BLOCK = 64
GROUP = 16


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, channels + 1) and the last S. Pairs are formed within blocks of at most BLOCK positions,
    sums once per block."""
    time = q.shape[2]
    v = torch.cat([v.to(q.dtype), torch.ones_like(v[..., :1], dtype=q.dtype)], -1)
    if not tracing.is_symbolic(time) and time == 1:  # a step of decoding: the equation as it stands
        last = before * (log_scale_before[..., None] - log_scale).exp()[..., None] + k.transpose(-1, -2) * v
        return q @ last, last
    q, k, v = (_blocks(t, BLOCK) for t in (q, k, v))
    count, size = q.shape[2:4]
    # filling repeats the last one
    filled = running_maximum(F.pad(log_scale, (0, count * size - time), value=torch.finfo(log_scale.dtype).min))
    log_scale = filled.unflatten(2, (count, size))
    ends = log_scale[..., -1:]
    near = ((q @ k.transpose(-1, -2)) * decays(log_scale)) @ v
    added = (k * (log_scale - ends).exp()[..., None]).transpose(-1, -2) @ v
    log_scales = torch.cat([log_scale_before[..., None], ends.squeeze(-1)], 2)
    sums = decayed_sums(torch.cat([before[:, :, None], added], 2), log_scales)
    far = (q @ sums[:, :, :-1]) * (log_scales[:, :, :-1, None] - log_scale).exp()[..., None]
    return _first((near + far).flatten(2, 3), time, 2), sums[:, :, -1]


def decayed_sums(sums: Tensor, log_scale: Tensor) -> Tensor:
    """sum_{j <= i} exp(l_j - l_i) sums_j for each i: (batch, heads, n, width, channels).

    log_scale: l (batch, heads, n), never falling. A running sum with one common scale would overflow where l rises far,
    and a loop over n cannot be compiled for any n; so at most GROUP neighbours are summed by a triangular matrix of
    scales, and groups by another. That one is square in n / GROUP, which stays the smaller part of the work up to
    about a million tokens.
    """
    n = sums.shape[2]
    if tracing.is_symbolic(n):  # groups of groups: more than an export can know about
        return (decays(log_scale) @ sums.flatten(3)).unflatten(-1, sums.shape[3:])
    grouped, log_scale = _blocks(sums.flatten(3), GROUP), _blocks(log_scale[..., None], GROUP).squeeze(-1)
    inner = decays(log_scale) @ grouped
    last = log_scale[..., -1]
    # Filling entries have sums 0 and any log_scale; only the last group has them, and its total is not used.
    totals = decays(last) @ inner[..., -1, :]
    carried = F.pad(totals[:, :, :-1], (0, 0, 1, 0))
    scale = (F.pad(last[:, :, :-1], (1, 0))[..., None] - log_scale).clamp(max=0).exp()
    result = inner + scale[..., None] * carried[..., None, :]
    return result.flatten(2, 3)[:, :, :n].unflatten(-1, sums.shape[3:])


def decays(log_scale: Tensor) -> Tensor:
    """Lower-triangular exp(l_j - l_i): (..., n) -> (..., n, n)."""
    return (log_scale[..., None, :] - log_scale[..., None]).clamp(max=0).exp().tril()


def running_maximum(log_scale: Tensor) -> Tensor:
    """max_{j <= i} l_j for each i: (batch, heads, n)."""
    if not tracing.is_exporting():
        return log_scale.cummax(-1).values
    # ONNX has no such operation, so blocks are compared pair by pair, and then their ends.
    inner = _maxima_up_to(_blocks(log_scale[..., None], BLOCK).squeeze(-1), 0)
    before = _maxima_up_to(inner[..., -1], -1)
    return _first(torch.maximum(inner, before[..., None]).flatten(2), log_scale.shape[2], 2)


def _maxima_up_to(log_scale: Tensor, last: int) -> Tensor:
    """max_{j <= i + last} l_j, or the least number without such a j, for few entries: (..., n), through (..., n, n)."""
    n = log_scale.shape[-1]
    past = torch.ones(n, n, dtype=torch.bool, device=log_scale.device).tril(last)
    return torch.where(past, log_scale[..., None, :], torch.finfo(log_scale.dtype).min).amax(-1)


def _split(n: int, most: int) -> tuple[int, int]:
    """count and size <= most of equal blocks that hold n entries, as few and as short as will do.

    Compiled code has to serve any n: there every block is full size, with at least one free entry in the last, because
    one graph cannot cover both blocks with and blocks without filling. Nor can an export cover one block and several.
    """
    if tracing.is_symbolic(n):
        return n // most + 2, most
    if tracing.is_tracing() and not tracing.is_exporting():
        return n // most + 1, most
    count = -(-n // most)
    return count, -(-n // count)


def _first(t: Tensor, count: int, dim: int) -> Tensor:
    """The first entries of an axis. An export does not know of every count whether there are so many: it looks up."""
    return (
        t.index_select(dim, torch.arange(count, device=t.device))
        if tracing.is_symbolic(count)
        else t.narrow(dim, 0, count)
    )


def _blocks(t: Tensor, most: int) -> Tensor:
    """(batch, heads, n, c) -> (batch, heads, count, size, c), zeros filling the last block."""
    count, size = _split(t.shape[2], most)
    return F.pad(t, (0, 0, 0, count * size - t.shape[2])).unflatten(2, (count, size))
