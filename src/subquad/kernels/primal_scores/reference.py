"""Scores of primal attention in plain torch: the definition, in every precision and on every device."""

import torch
from torch import Tensor

from subquad.kernels.precision import at_least_float32, full_precision
from subquad.kernels.primal_scores import SMALLEST_NORM


def primal_scores(qk: Tensor, weights: Tensor, lengths: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Scores, in float32 at least, and mean squares; see the public function."""
    with full_precision(qk):
        u = at_least_float32(qk).flatten(2, 3).transpose(1, 2)
        scores = projected(u.cumsum(2) if causal else u, weights.flatten(1, 2))
        e, r = scores.chunk(2, 1)
        squares = e.square() + r.square()
        if lengths is None:
            squares = squares.mean(2)
        else:
            padding = torch.arange(qk.shape[1], device=qk.device) >= lengths[:, None]
            squares = squares.masked_fill(padding[:, None, :, None], 0).sum(2) / lengths[:, None, None]
        return torch.cat((e.transpose(1, 2), r.transpose(1, 2)), -1), squares


def projected(u: Tensor, weights: Tensor) -> Tensor:
    """(u / |u|) W of queries and keys u (batch, 2 heads, time, d), W (batch or 1, 2 heads, d, s): (.., time, s)."""
    # divided after the product: what is divided is s wide instead of d, and squares have a cheaper gradient than norms
    inverse = u.square().sum(-1, keepdim=True).clamp(min=SMALLEST_NORM**2).rsqrt()
    return (u @ weights) * inverse
