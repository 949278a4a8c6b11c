"""Attention as the original programs compute it, in plain torch: views of windows and chunks, and einsum.

A formulation takes the weights of our mixer, and asks for the same draws; it keeps all logits, and builds the masks
that the originals build, also where nothing is masked. Lengths are multiples of the window. q, k, v are
(batch, heads, time, d) as in the mixers; w is a window, e what it reaches beyond, r a chunk, s = d^-1/2,
phi(w, t) = s w.t - s |t|^2 / 2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.mixers import noise

MASKED = -5e4

# ---------------------------------------------------------------------- what they share


def project(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = mixer.qkv(x).unflatten(-1, (3, mixer.config.heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def merge(mixer: Any, y: Tensor) -> Tensor:
    """(batch, heads, time, d) -> (batch, time, C)."""
    return mixer.out(y.transpose(1, 2).flatten(2))


def gather(t: Tensor, size: int, back: int = 0, ahead: int = 0, fill: float = 0.0) -> Tensor:
    """Windows (..., groups, back + size + ahead, d) of t (..., time, d), with `fill` outside: views that overlap.

    Products with them make copies.
    """
    if back or ahead:
        t = F.pad(t, (0, 0, back, ahead), value=fill)
    return t.unfold(-2, back + size + ahead, size).transpose(-1, -2)


def outside(x: Tensor, size: int, back: int = 0, ahead: int = 0) -> Tensor:
    """Which keys of the windows are none, (batch, 1, groups, 1, keys) bool: those that reach beyond the sequence."""
    padding = gather(x.new_zeros(x.shape[0], 1, x.shape[1], 1), size, back, ahead, fill=1.0)
    return padding.bool().transpose(-1, -2)


def phi(w: Tensor, t: Tensor, scale: float) -> Tensor:
    """(..., c, d), (..., n, d) -> (..., c, n)."""
    return torch.einsum("...cd,...nd->...cn", w, scale * t) - scale / 2 * t.square().sum(-1).unsqueeze(-2)


# ---------------------------------------------------------------------- formulations


def local(mixer: Any, x: Tensor) -> Tensor:
    """Windows of queries, and copies of keys and values that overlap."""
    w, e = mixer.config.window, mixer.look_back
    q, k, v = project(mixer, x)
    q, k, v = gather(q, w), gather(k, w, e, e), gather(v, w, e, e)
    logits = mixer.scale * torch.einsum("bhgid,bhgjd->bhgij", q, k)
    logits = logits.masked_fill(outside(x, w, e, e), MASKED)
    return merge(mixer, torch.einsum("bhgij,bhgjd->bhgid", logits.softmax(-1), v).flatten(2, 3))


def chunk_summaries(mixer: Any, q: Tensor, k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """k~ and beta of chunks that lie side by side, each (batch, heads, chunks, d)."""
    padding = gather(q.new_zeros(q.shape[0], 1, q.shape[2], 1), size).bool()
    q, k, v = (gather(t, size).masked_fill(padding, 0.0) for t in (q, k, v))
    k_mean, q_mean = mixer.k_map(k.mean(-2)), mixer.q_map(q.mean(-2))
    mu = q_mean + k_mean if mixer.config.is_decoder else (q_mean + k_mean) / 2
    omega = mu + noise.normal(mu.shape, mu)
    logits = phi(omega.unsqueeze(-2), k, mixer.scale).masked_fill(padding.transpose(-1, -2), MASKED)
    return k_mean, torch.einsum("bhcj,bhcjd->bhcd", logits.squeeze(-2).softmax(-1), v)


def eva(mixer: Any, x: Tensor) -> Tensor:
    """Logits of all windows and of all chunks side by side, in one softmax."""
    w, landmarks = mixer.config.window, mixer.config.landmarks
    q, k, v = project(mixer, x)
    chunk_k, chunk_v = chunk_summaries(mixer, q, k, v, max(1, x.shape[1] // landmarks))
    q, k, v = gather(q, w), gather(k, w), gather(v, w)
    near = mixer.scale * torch.einsum("bhgid,bhgjd->bhgij", q, k)
    near = near.masked_fill(outside(x, w), MASKED)
    far = mixer.scale * torch.einsum("bhgid,bhcd->bhgic", q, chunk_k)
    near, far = torch.cat([near, far], -1).softmax(-1).split([near.shape[-1], far.shape[-1]], -1)
    y = torch.einsum("bhgij,bhgjd->bhgid", near, v) + torch.einsum("bhgic,bhcd->bhgid", far, chunk_v)
    return merge(mixer, y.flatten(2, 3))


def causal_eva(mixer: Any, x: Tensor) -> Tensor:
    """Time first and three projections; every query has logits of all chunks, of which the later ones are masked."""
    config, (batch, time, _) = mixer.config, x.shape
    w, r = config.window, config.chunk_size
    weights, biases = mixer.qkv.weight.chunk(3), mixer.qkv.bias.chunk(3)
    x = x.transpose(0, 1)
    parts = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    q, k, v = (part.reshape(time, batch, config.heads, -1).permute(1, 2, 0, 3) for part in parts)
    chunk_k, chunk_v = chunk_summaries(mixer, q, k, v, r)
    far = mixer.scale * torch.einsum("bhid,bhcd->bhic", q, chunk_k)
    position = torch.arange(time)
    far = far.masked_fill(torch.arange(far.shape[-1]) >= (position // r)[:, None], MASKED)
    far = gather(far, w)
    q, k, v = gather(q, w), gather(k, w), gather(v, w)
    near = mixer.scale * torch.einsum("bhgid,bhgjd->bhgij", q, k)
    near = near.masked_fill(outside(x.transpose(0, 1), w), MASKED)
    near = near.masked_fill(torch.ones(w, w, dtype=torch.bool).triu(1), MASKED)
    near, far = torch.cat([near, far], -1).softmax(-1).split([w, far.shape[-1]], -1)
    y = torch.einsum("bhgij,bhgjd->bhgid", near, v) + torch.einsum("bhgic,bhcd->bhgid", far, chunk_v)
    y = y.flatten(2, 3).permute(2, 0, 1, 3).reshape(time, batch, -1)
    return mixer.out(y).transpose(0, 1)


def lara(mixer: Any, x: Tensor) -> Tensor:
    """All logits between landmarks and tokens are kept; weights `opt`, one sample."""
    scale, count = mixer.scale, mixer.config.landmarks
    q, k, v = project(mixer, x)
    count = min(count, x.shape[1])
    q_bar, k_bar = (t.unflatten(2, (count, -1)).mean(3) for t in (q, k))
    mu = q_bar + k_bar
    omega = mu + noise.normal(mu.shape, mu)
    of_queries, of_keys = phi(omega, q, scale), phi(omega, k, scale)
    values = torch.einsum("bhcj,bhjd->bhcd", of_keys.softmax(-1), v)
    density = phi(omega, mu, scale)
    own = density.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    share = (scale * torch.einsum("bhcd,bhid->bhci", q_bar, q)).softmax(-1)
    alpha = (own - density.logsumexp(-1, keepdim=True)).exp()
    alpha = alpha + mixer.config.alpha * (share - share.mean(-2, keepdim=True))
    logits = alpha.clamp(min=1e-8).log() + of_queries + of_keys.logsumexp(-1, keepdim=True) - own
    return merge(mixer, torch.einsum("bhci,bhcd->bhid", logits.softmax(-2), values))


def features(mixer: Any, t: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """W t' and |t'|^2 / 2 with t' = t d^-1/4: (batch, heads, time, m) and (batch, heads, time, 1)."""
    t = t * mixer.config.head_width**-0.25
    return torch.einsum("bhnd,hmd->bhnm", t, matrix), t.square().sum(-1, keepdim=True) / 2


def keep_all(k: Tensor) -> Tensor:
    """Features of keys with those of padding set to zero, of which there is none."""
    return k.masked_fill(torch.zeros(k.shape[0], 1, k.shape[2], 1, dtype=torch.bool), 0.0)


def performer(mixer: Any, x: Tensor) -> Tensor:
    """Features of all queries and keys, then their products."""
    matrix, root = mixer.projection(), mixer.config.features**-0.5
    q, k, v = project(mixer, x)
    (q, q_norm), (k, k_norm) = features(mixer, q, matrix), features(mixer, k, matrix)
    q = root * (q - q_norm - q.detach().amax(-1, keepdim=True)).exp() + 1e-4
    k = root * (k - k_norm - k.detach().amax((-2, -1), keepdim=True)).exp() + 1e-4
    k = keep_all(k)
    sums = torch.einsum("bhnm,bhnd->bhmd", k, v)
    total = torch.einsum("bhnm,bhm->bhn", q, k.sum(-2)).clamp(min=1e-2)
    return merge(mixer, torch.einsum("bhnm,bhmd->bhnd", q, sums) / total.unsqueeze(-1))


def causal_performer(mixer: Any, x: Tensor) -> Tensor:
    """Running sums of all products of features and values, in pieces of 128 positions."""
    matrix, root = mixer.projection(), mixer.config.features**-0.5
    q, k, v = project(mixer, x)
    (q, q_norm), (k, k_norm) = features(mixer, q, matrix), features(mixer, k, matrix)
    q = root * (q - q_norm - q.detach().amax(-1, keepdim=True)).exp() + 1e-4
    # features of keys relative to the largest of all; what a query has seen of them decides the factor of its sums
    largest = k.detach().amax(-1, keepdim=True)
    seen, last = largest.cummax(-2).values, largest.amax(-2, keepdim=True)
    k, factor = root * (k - k_norm - last).exp(), (last - seen).exp()
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    sums, constants, pieces = torch.zeros(()).to(v), torch.zeros(()).to(v), []
    for q_piece, k_piece, v_piece, scale in zip(*(t.split(128, 2) for t in (q, k, v, factor)), strict=True):
        running = sums + torch.einsum("bhnm,bhnd->bhnmd", k_piece, v_piece).cumsum(2)
        plain = constants + 1e-4 * v_piece.cumsum(2)
        y = scale * torch.einsum("bhnm,bhnmd->bhnd", q_piece, running) + q_piece.sum(-1, keepdim=True) * plain
        pieces.append(y)
        sums, constants = running[:, :, -1:], plain[:, :, -1:]
    y = torch.cat(pieces, 2)
    return merge(mixer, y[..., :-1] / y[..., -1:].clamp(min=1e-2))
