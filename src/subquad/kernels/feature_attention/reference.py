"""Linear attention through features in plain torch: the definition, in every precision and on every device.

Gradients flow through the scores. `sum_keys` and `read_sums` serve features of any kind.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.feature_attention import Constant, FeatureScores
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.precision import at_least_float32, full_precision
from subquad.kernels.scan.reference import causal_sums, running_maximum


class Sums(NamedTuple):
    """Over all keys: values, sum_j phi(k_j) v_j^T (batch, heads, m, d); counts, sum_j phi(k_j) (batch, heads, m, 1)."""

    values: Tensor
    counts: Tensor


def feature_scores(qkv: Tensor, matrix: Tensor) -> FeatureScores:
    """y, c and the largest y of queries and keys."""
    t = at_least_float32(qkv[:, :, :2]).permute(2, 0, 3, 1, 4)
    with full_precision(qkv):
        y, c = scores_of(t, matrix)
    return FeatureScores(y, c, y.detach().amax(-1))


def scores_of(t: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """y = W t d^(-1/4) and c = |t|^2 d^(-1/2) / 2 of t (..., heads, time, d): (..., time, m) and (..., time)."""
    width = t.shape[-1]
    # the scale goes to the small matrix and the small sums: every pass over all tokens costs
    y = t @ (matrix.to(t.dtype) * width**-0.25).transpose(-1, -2)
    return y, t.square().sum(-1) * (width**-0.5 / 2)


def feature_attention(
    qkv: Tensor, matrix: Tensor, mask: Tensor | None, eps: float, least: float, causal: bool, constant: Constant
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    scores = feature_scores(qkv, matrix)
    if causal:
        return causal_attention(qkv, scores, mask, eps, least, constant)
    return attend(qkv, scores, log_scales(scores, mask, constant), mask, eps, least)


def log_scales(scores: FeatureScores, mask: Tensor | None, constant: Constant) -> Tensor:
    """M (2, batch, heads, time): every query's own largest y, and that of all keys of its row."""
    query, key = constant(scores.log_scale).unbind(0)
    return torch.stack([query, _only(key, mask).amax(-1, keepdim=True).expand_as(query)])


def attend(
    qkv: Tensor, scores: FeatureScores, log_scale: Tensor, mask: Tensor | None, eps: float, least: float
) -> Tensor:
    """The attention to all keys of a row, given M = log_scale."""
    shift = -scores.c - (log_scale + math.log(scores.y.shape[-1]) / 2)
    query, key = (scores.y + shift[..., None]).exp().unbind(0)
    v = at_least_float32(qkv[:, :, 2].transpose(1, 2))
    with full_precision(qkv):
        return read_sums(query, sum_keys(key, v, mask, eps), eps, least).transpose(1, 2)


def causal_attention(
    qkv: Tensor, scores: FeatureScores, mask: Tensor | None, eps: float, least: float, constant: Constant
) -> Tensor:
    """The attention to the keys up to each position. M grows along the sequence, so `causal_sums` carries it along."""
    own = constant(scores.log_scale)
    values = (scores.y - (scores.c + own)[..., None]).exp() * scores.y.shape[-1] ** -0.5
    key_scale = _only(own[1], mask)
    reached = running_maximum(key_scale)
    query, key = values[0] + eps, values[1] * (key_scale - reached).exp()[..., None]
    v = qkv[:, :, 2].transpose(1, 2)
    wide = at_least_float32(v)
    ones = torch.ones_like(wide[..., :1])
    if mask is not None:
        kept = mask[:, None, :, None].to(wide.dtype)
        key, wide, ones = key * kept, wide * kept, ones * kept
    batch, heads, _, width = v.shape
    with full_precision(qkv):
        before = query.new_zeros(batch, heads, query.shape[-1], width + 1)
        mixed, _ = causal_sums(query, key, v, reached, before, torch.full_like(reached[..., 0], MASK_VALUE))
        mixed = mixed + torch.cat([wide, ones], -1).cumsum(2) * (query.sum(-1, keepdim=True) * eps)
        return (mixed[..., :-1] / mixed[..., -1:].clamp(min=least)).transpose(1, 2)


def _only(log_scale: Tensor, mask: Tensor | None) -> Tensor:
    """Log scales (batch, heads, time) with those of what is not a key below all others."""
    return log_scale if mask is None else log_scale.masked_fill(~mask[:, None], MASK_VALUE)


def sum_keys(phi: Tensor, v: Tensor, mask: Tensor | None, eps: float) -> Sums:
    """Sums of phi + eps, features phi (batch, heads, time, m) of keys with values v (batch, heads, time, d)."""
    number: Tensor | int = v.shape[2]
    if mask is not None:
        kept = mask[:, None, :, None].to(v.dtype)
        phi, v, number = phi * kept, v * kept, kept.sum(-2, keepdim=True)
    values, counts = phi.transpose(-1, -2) @ v, phi.sum(-2).unsqueeze(-1)
    if eps:  # added to the sums instead of to every feature
        values, counts = values + eps * v.sum(-2, keepdim=True), counts + eps * number
    return Sums(values, counts)


def read_sums(phi: Tensor, sums: Sums, eps: float, least: float) -> Tensor:
    """(phi + eps) S / max((phi + eps).z, least) of features (batch, heads, time, m): (batch, heads, time, d)."""
    above, below = phi @ sums.values, phi @ sums.counts
    if eps:
        above = above + eps * sums.values.sum(-2, keepdim=True)
        below = below + eps * sums.counts.sum(-2, keepdim=True)
    return above * below.clamp(min=least).reciprocal()
