"""Attention through landmarks: every landmark sums up the keys, and every query weighs the landmarks.

Per head, with s = d^-1/2, for landmarks c, keys j and queries i:

    u_c  = sum_j A_cj v_j,  A_c = softmax_j(l_c),  l_cj = s (w_c.k_j - |k_j|^2 / 2)
    y_i  = sum_c W_ci u_c,  W_ci = a_ci exp(z_ci) / sum_c' a_c'i exp(z_c'i),  z_ci = s w'_c.q_i + b_c + LSE_j l_cj
    a_ci = max(beta_c + alpha (t_ci - sum_c' p_c' t_c'i), 1e-8),  t_c = softmax_i(s f_c.q_i)       (or a = 1)
"""

from typing import NamedTuple

from torch import Tensor

from subquad.kernels.dispatch import choose

LEAST_WEIGHT = 1e-8
LARGE = "more than 128 landmarks or channels of a head, or more than 64 of both"
"""A case that a kernel whose programs hold the matrices of all landmarks has no registers for."""


class OptWeights(NamedTuple):
    """What makes the weight a_ci of a landmark depend on the query: f, beta, p and alpha, of which p is a constant."""

    directions: Tensor  # (batch, heads, c, d)
    balance: Tensor  # (batch, heads, c, 1)
    mean_weights: Tensor  # (batch or 1, c)
    alpha: float


def landmark_attention(
    qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, opt: OptWeights | None, mask: Tensor | None
) -> Tensor:
    """y (batch, time, heads, d) of projections qkv (batch, time, 3, heads, d).

    w_keys, w_queries: w and w' (batch, heads, c, d). shared: b (batch, heads, c, 1). opt: None for a = 1.
    mask: (batch, time) bool, False for positions that count neither as keys nor in t; None: all count.
    """
    _, _, landmarks, width = w_keys.shape
    is_large = landmarks > 128 or width > 128 or (landmarks > 64 and width > 64)
    kernel = choose("landmark_attention", qkv, *((LARGE,) if is_large else ()))
    return kernel.landmark_attention(qkv, w_keys, w_queries, shared, opt, mask)
