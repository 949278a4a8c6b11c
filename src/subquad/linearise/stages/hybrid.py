"""Which layers keep their attention: those whose replacement costs most, each measured by itself.

Every layer is replaced alone, by its mixer as attention transfer left it, and the loss is measured. That layers are
replaced together is left out of account: measuring all choices of k of n layers would take n! / (k! (n - k)!) passes
over the data instead of n.
"""

from collections.abc import Callable

from torch import nn

from subquad.linearise.stages.batches import Samples
from subquad.linearise.stages.layers import AttentionLayers
from subquad.linearise.stages.objective import evaluate


def replacement_losses(
    model: nn.Module,
    layers: AttentionLayers,
    samples: Samples,
    size: int,
    report: Callable[[str], None] = lambda _: None,
) -> dict[int, float]:
    """Returns the loss in nats of the model in which one layer is replaced, by the number of the layer."""
    losses = {}
    for number in layers.layers:
        report(f"measures the replacement of layer {number}")
        with layers.replaced([number]):
            losses[number] = evaluate(model, samples, size).loss().value
    return losses


def most_costly(losses: dict[int, float], count: int) -> list[int]:
    """Returns the layers with the largest losses, in the order of the model; of equals the later ones are replaced."""
    if not 0 <= count < len(losses):
        raise ValueError(f"--keep {count}: at least one of {len(losses)} layers has to be replaced")
    return sorted(sorted(losses, key=lambda number: (-losses[number], number))[:count])
