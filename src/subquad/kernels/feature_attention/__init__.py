"""Linear attention through positive exponential features.

With y = W t d^(-1/4) and c = |t|^2 d^(-1/2) / 2 for queries and keys t of a head, and logarithms of scales M, which
keep exponentials in range (constants for the gradient):

    phi(t) = exp(y - c - M) m^(-1/2)
    S = sum_j (phi(k_j) + eps) v_j^T,   z = sum_j phi(k_j) + eps
    y_i = (phi(q_i) + eps) S / max((phi(q_i) + eps).z, least)

M depends on all keys, so there are two functions: the first gives y, c and the largest y of each token, of which the
caller makes M; the second is the attention.
"""

from typing import NamedTuple

from torch import Tensor

from subquad.kernels.dispatch import choose


class FeatureScores(NamedTuple):
    """Of queries and keys (2): y (2, batch, heads, time, m); c and the largest of y: (2, batch, heads, time)."""

    y: Tensor
    c: Tensor
    log_scale: Tensor


def feature_scores(qkv: Tensor, matrix: Tensor) -> FeatureScores:
    """Scores of projections qkv (batch, time, 3, heads, d) with W (heads, m, d), for the attention of the same two."""
    return choose("feature_attention", qkv).feature_scores(qkv, matrix)


def feature_attention(
    qkv: Tensor, matrix: Tensor, scores: FeatureScores, log_scale: Tensor, mask: Tensor | None, eps: float, least: float
) -> Tensor:
    """y (batch, time, heads, d) of projections qkv (batch, time, 3, heads, d) with W = matrix (heads, m, d).

    scores: those of the same qkv and matrix. log_scale: M, broadcastable to (2, batch, heads, time). mask: bool
    (batch, time), False for positions that are no keys; None: all are.
    """
    kernel = choose("feature_attention", qkv)
    return kernel.feature_attention(qkv, matrix, scores, log_scale.detach(), mask, eps, least)
