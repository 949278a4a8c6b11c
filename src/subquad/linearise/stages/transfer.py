"""Attention transfer: every mixer learns to reproduce the output of the attention whose place it will take.

Of a batch the teacher computes one forward pass, without gradients. At each attention layer the mixer gets the same
inputs as the attention, and the gradient of

    loss = sum_i |mixer(x)_i - attention(x)_i|^2 / sum_i |attention(x)_i|^2

over the positions i that are no padding is computed on the spot. So all layers learn in one pass, each from the
teacher's own activations, and only one layer's activations are in memory at a time. A loss of 1 is that of a mixer that
returns zeros. Mixers are in eval mode: they learn to compute what they compute when they are used, without dropout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from subquad.linearise.stages.batches import Batch, Samples
from subquad.linearise.stages.layers import AttentionLayer, AttentionLayers
from subquad.linearise.stages.objective import SEED, logits_of


class AttentionTransfer:
    """The gradients of all mixers from one pass of the teacher; `__call__` is the `Backward` of a stage."""

    def __init__(self, model: nn.Module, layers: AttentionLayers) -> None:
        self.model, self.layers = model, layers

    def __call__(self, batch: Batch) -> dict[str, float]:
        losses = self._compare(batch, learn=True)
        return {"transfer": sum(losses.values()) / len(losses)}

    def errors(self, samples: Samples, size: int) -> dict[int, float]:
        """Returns the mean loss of every layer on samples, `size` at a time."""
        device = next(self.model.parameters()).device
        sums = dict.fromkeys(self.layers.layers, 0.0)
        for start in range(0, len(samples), size):
            numbers = range(start, min(start + size, len(samples)))
            found = self._compare(samples.batch(numbers, SEED).to(device), learn=False)
            sums = {number: total + len(numbers) * found[number] for number, total in sums.items()}
        return {number: total / len(samples) for number, total in sums.items()}

    def _compare(self, batch: Batch, learn: bool) -> dict[int, float]:
        """Returns the loss of every layer on a batch. learn: whether gradients are added to the mixers' parameters."""
        losses: dict[int, float] = {}
        mask = batch.inputs.get("attention_mask")
        mask = None if mask is None else mask.bool()
        self.model.eval()
        with torch.no_grad(), self._watched(losses, mask, learn):
            logits_of(self.model, batch)
        return losses

    @contextmanager
    def _watched(self, losses: dict[int, float], mask: Tensor | None, learn: bool) -> Iterator[None]:
        handles = []
        for layer in self.layers.layers.values():
            layer.replacement.eval()
            hook = _comparison(layer, losses, mask, learn)
            handles.append(layer.attention.register_forward_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _comparison(layer: AttentionLayer, losses: dict[int, float], mask: Tensor | None, learn: bool) -> Any:
    """A hook of the attention that calls the replacement with the same inputs."""

    def compare(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        target = layer.target(output)
        with torch.set_grad_enabled(learn):
            found = layer.replacement(*arguments, **options)
            loss = relative_error(found[0] if isinstance(found, tuple) else found, target, mask)
            if loss.requires_grad:
                loss.backward()
        losses[layer.number] = float(loss.detach())

    return compare


def relative_error(y: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns |y - target|^2 / |target|^2, summed over (batch, time, channels). mask: (batch, time), True = keep."""
    if mask is not None and mask.shape == y.shape[:2]:
        y, target = y[mask], target[mask]
    target = target.float()
    return (y.float() - target).square().sum() / target.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
