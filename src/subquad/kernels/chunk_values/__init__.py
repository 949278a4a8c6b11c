"""Values of chunks: each chunk of a sequence as one value, an average that a query of its own weighs.

u_c = sum_{j in c} softmax_j( s (w_c.k_j - |k_j|^2 / 2) ) v_j          s = d^-1/2, per head
"""

from torch import Tensor

from subquad.kernels.chunk_values.reference import gathered_chunk_values as gathered_chunk_values
from subquad.kernels.dispatch import choose


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    """u (batch, heads, chunks, d) of projections qkv (batch, time, 3, heads, d), time a multiple of the chunks.

    w: (batch, heads, chunks, d). mask: (batch or 1, time) bool, False for positions that belong to no chunk; None: all
    belong to one. A chunk without any position has the value zero.
    """
    return choose("chunk_values", qkv).chunk_values(qkv, w, mask)
