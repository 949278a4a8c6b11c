"""Linear attention through positive exponential features.

With y = W t d^(-1/4) and c = |t|^2 d^(-1/2) / 2 for queries and keys t of a head, and logarithms of scales M, which
keep exponentials in range (constants for the gradient):

    phi(t) = exp(y - c - M) m^(-1/2)
    S = sum_j (phi(k_j) + eps) v_j^T,   z = sum_j phi(k_j) + eps
    y_i = (phi(q_i) + eps) S / max((phi(q_i) + eps).z, least)

M of a query is its own largest y, M of the keys that of all keys which the query sees: all of its row, or, causal,
those up to its own position, over which the sums run then.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from subquad.kernels.dispatch import choose

MOST_WIDTH = 128
"""Wider heads do not fit the tiles of the GPU kernels."""


class FeatureScores(NamedTuple):
    """Of queries and keys (2): y (2, batch, heads, time, m); c and the largest of y: (2, batch, heads, time)."""

    y: Tensor
    c: Tensor
    log_scale: Tensor


Constant = Callable[[Tensor], Tensor]
"""What makes a statistic a constant for the gradient; tests replace it to repeat the constants of an earlier pass."""


def feature_attention(
    qkv: Tensor,
    matrix: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    *,
    causal: bool = False,
    constant: Constant = Tensor.detach,
) -> Tensor:
    """y (batch, time, heads, d) of projections qkv (batch, time, 3, heads, d) with W = matrix (heads, m, d).

    mask: bool (batch, time), False for positions that are no keys; None: all are.
    """
    needs = ["wide heads"] if qkv.shape[-1] > MOST_WIDTH else []
    kernel = choose("feature_attention", qkv, *needs)
    return kernel.feature_attention(qkv, matrix, mask, eps, least, causal, constant)
