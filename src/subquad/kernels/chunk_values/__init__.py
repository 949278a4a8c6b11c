"""Values of chunks: each chunk of a sequence as one value, an average that a query of its own weighs.

u_c = sum_{j in c} softmax_j( s (w_c.k_j - |k_j|^2 / 2) ) v_j          s = d^-1/2, per head

Chunks lie side by side: position j belongs to chunk floor(j / size). The size may differ between the rows of a batch.
"""

from torch import Tensor

from subquad.kernels.chunk_values.reference import gathered_chunk_values as gathered_chunk_values
from subquad.kernels.chunk_values.reference import members as members
from subquad.kernels.dispatch import choose


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None, size: int | Tensor) -> tuple[Tensor, Tensor]:
    """qkv, and u (batch, heads, chunks, d) of these projections qkv (batch, time, 3, heads, d).

    w: (batch, heads, chunks, d). mask: (batch or 1, time) bool, False for positions that belong to no chunk; None: all
    belong to one. size: the positions of a chunk, or (batch,) int64 for each row. Positions beyond the last chunk
    belong to none. A chunk without any position has the value zero.

    What reads qkv afterwards has to read the one that is returned: kernels then add the gradients up in one place.
    """
    return choose("chunk_values", qkv).chunk_values(qkv, w, mask, size)


def chunk_means(qkv: Tensor, mask: Tensor | None, size: int | Tensor, divisors: Tensor) -> tuple[Tensor, ...]:
    """qkv, to be read afterwards, and means of the queries and of the keys of each chunk, (batch, heads, chunks, d).

    qkv, mask and size are those of `chunk_values`. divisors: (batch or 1, chunks) int64, by which sums are divided.
    """
    return choose("chunk_values", qkv).chunk_means(qkv, mask, size, divisors)
