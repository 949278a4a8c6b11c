"""Tokens at chosen positions in plain torch."""

from torch import Tensor


def tokens_at(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """x, and its tokens (batch, samples, C); see the public function."""
    return x, x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
