"""Values of chunks in plain torch: the definition, also for chunks that overlap or have sizes of their own."""

from torch import Tensor

from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32, full_precision


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    """u (batch, heads, chunks, d); see the public function."""
    chunks = w.shape[2]
    k, v = (part.transpose(1, 2).unflatten(2, (chunks, -1)) for part in qkv.unbind(2)[1:])
    return gathered_chunk_values(k, v, w, None if mask is None else mask.unflatten(1, (chunks, -1)).unsqueeze(1))


def gathered_chunk_values(k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    """The same for chunks whose keys and values were brought together: k, v (batch, heads, chunks, cells, d).

    w: (batch, heads, chunks, d). mask: (batch or 1, 1, chunks, cells) bool, False for cells that stand for nothing.
    """
    with full_precision(k):
        k32 = at_least_float32(k)
        direct = (k32 @ at_least_float32(w).unsqueeze(-1)).squeeze(-1)
        logits = k.shape[-1] ** -0.5 * (direct - k32.square().sum(-1) / 2)
        probs = keep(logits, mask).softmax(-1)
        if mask is not None:
            probs = probs * mask  # in a chunk without cells all are alike
        probs = probs.to(v.dtype)
    return (probs.unsqueeze(-2) @ v).squeeze(-2)
