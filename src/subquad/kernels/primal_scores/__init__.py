"""Scores of primal attention: tokens, or their running sums, of length 1, projected on singular vectors.

    u_t = x_t, or, causal, sum_{i <= t} x_i             for the queries and the keys x of every head
    s_t = (u_t / max(|u_t|, 1e-12)) W                   W: We for queries, Wr for keys, (d, s) per head

With them come the means over the tokens of each row of the squares, s_t^2 of queries plus s_t^2 of keys, which the
regulariser of primal attention weighs.
"""

from torch import Tensor

from subquad.kernels.dispatch import choose

SMALLEST_NORM = 1e-12
MOST_WIDTH = 128
"""Wider heads, or more singular vectors, do not fit the tiles of the GPU kernels."""


def primal_scores(
    qk: Tensor, weights: Tensor, lengths: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Scores (batch, time, heads, 2 s), of queries and then of keys, and mean squares (batch, heads, s).

    qk: (batch, time, 2, heads, d); weights: W (batch or 1, 2, heads, d, s) in float32 or float64; lengths: (batch,),
    how many positions of a row are tokens, its first; None: all. The mean squares are in the precision of W.
    """
    needs = ["large tiles"] if max(weights.shape[-2:]) > MOST_WIDTH else []
    return choose("primal_scores", qk, *needs).primal_scores(qk, weights, lengths, causal)
