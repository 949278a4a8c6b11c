"""The cross-entropy of words: a program has a row of logits, which its gradient replaces."""

from benchmarks.gpu.traffic import Traffic, loaded, traffic
from benchmarks.gpu.triton_launches import Launch


@traffic("cross_entropy._row_loss")
def row_loss(launch: Launch) -> Traffic:
    """Logits are read twice where there is a gradient. As if no target were padding, whose row is not read."""
    k = launch.arguments
    rows, passes = launch.grid[0], 2 if k.GRADIENT else 1
    row = k.vocab * (k.logits.element_size() + (k.bias.element_size() if k.HAS_BIAS else 0))
    others = k.target.element_size() + (k.scale.element_size() if k.HAS_SCALE and k.GRADIENT else 0)
    gradient = k.vocab * k.logits.element_size() if k.GRADIENT else 0
    stored = 2 * k.losses.element_size() + gradient
    return Traffic(rows * loaded(row + others, passes * row + others), rows * stored)
