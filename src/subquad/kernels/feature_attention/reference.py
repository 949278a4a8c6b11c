"""Linear attention through features in plain torch: the definition, in every precision and on every device.

Gradients flow through the scores. `sum_keys` and `read_sums` serve features of any kind.
"""

import math
from typing import NamedTuple

from torch import Tensor

from subquad.kernels.feature_attention import FeatureScores
from subquad.kernels.precision import at_least_float32, full_precision


class Sums(NamedTuple):
    """Over all keys: values, sum_j phi(k_j) v_j^T (batch, heads, m, d); counts, sum_j phi(k_j) (batch, heads, m, 1)."""

    values: Tensor
    counts: Tensor


def feature_scores(qkv: Tensor, matrix: Tensor) -> FeatureScores:
    """See the public function."""
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
    qkv: Tensor,
    matrix: Tensor,
    scores: FeatureScores,
    log_scale: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    shift = -scores.c - (log_scale + math.log(matrix.shape[1]) / 2)
    query, key = (scores.y + shift[..., None]).exp().unbind(0)
    v = at_least_float32(qkv[:, :, 2].transpose(1, 2))
    with full_precision(qkv):
        return read_sums(query, sum_keys(key, v, mask, eps), eps, least).transpose(1, 2)


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
