"""The gradient of tokens at chosen positions: tiles of TIME positions by CHANNELS channels."""

from benchmarks.gpu.traffic import Traffic, traffic
from benchmarks.gpu.triton_launches import Launch


@traffic("tokens_at.add_tokens")
def add_tokens(launch: Launch) -> Traffic:
    """A program reads all positions of its row, its tile of the gradient, and the tokens that belong to the tile."""
    k = launch.arguments
    read = sum(one.numel() * one.element_size() for one in (k.grad, k.tokens))
    read += launch.programs * k.samples * k.positions.element_size()
    return Traffic(read, k.out.numel() * k.out.element_size(), flops=k.tokens.numel() * k.TIME)
