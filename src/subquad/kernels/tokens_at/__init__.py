"""Tokens at chosen positions of a sequence, beside the sequence itself.

z[b, s] = x[b, positions[b, s]]            gradient of x:  dx[b, t] + sum of dz[b, s] over positions[b, s] = t
"""

from torch import Tensor

from subquad.kernels.dispatch import choose


def tokens_at(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """x, and its tokens z (batch, samples, C) at positions (batch, samples) int64, which never decrease in a row.

    What multiplies x (batch, time, C) afterwards has to read the one that is returned. On a GPU it has the precision
    that autocast gives products: the gradient is then written once, where autograd would cast it, make another one for
    z and add both, and equal positions are summed in a fixed order.
    """
    return choose("tokens_at", x).tokens_at(x, positions)
