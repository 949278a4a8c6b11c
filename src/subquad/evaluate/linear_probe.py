"""Multinomial logistic regression: what a model without hidden layers reaches on the same inputs.

    minimise over W, b      mean_i -log softmax(W x_i + b)[y_i] + strength / 2 ||W||^2

by L-BFGS, for one strength after the other from strong to weak, each from the solution of the one before, until the
accuracy on validation data falls: the weaker ones take longest, and would only fit noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_FEATURES = 3072
"""Inputs of the regression: larger images are averaged over neighbouring pixels down to so many."""
STRENGTHS = (1.0, 0.1, 0.01, 0.001, 0.0001)
ITERATIONS = 100


@dataclass(frozen=True)
class LinearProbe:
    """weight: (classes, features), bias: (classes,), of inputs whose mean was taken out and which were scaled."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: float
    strength: float

    def predict(self, inputs: Tensor) -> Tensor:
        """inputs: (n, features). Returns the classes (n,)."""
        return F.linear((inputs - self.mean) / self.scale, self.weight, self.bias).argmax(1)

    def accuracy(self, inputs: Tensor, labels: Tensor) -> float:
        return float((self.predict(inputs) == labels).double().mean())


def fit_linear_probe(
    inputs: Tensor,
    labels: Tensor,
    num_classes: int,
    valid: tuple[Tensor, Tensor],
    strengths: Sequence[float] = STRENGTHS,
) -> LinearProbe:
    """The best on `valid` before the accuracy falls. inputs: (n, features); labels: (n,) int64.

    strengths: from strong to weak; of equally good ones the strongest is taken.
    """
    mean = inputs.mean(0)
    scale = float((inputs - mean).square().mean().sqrt().clamp(min=1e-6))
    scaled = (inputs - mean) / scale
    weight = torch.zeros(num_classes, inputs.shape[1], dtype=inputs.dtype)
    bias = torch.zeros(num_classes, dtype=inputs.dtype)
    best, highest = None, -1.0
    for strength in strengths:
        weight, bias = _minimise(scaled, labels, weight, bias, strength)
        probe = LinearProbe(weight, bias, mean, scale, strength)
        accuracy = probe.accuracy(*valid)
        if accuracy < highest:
            break
        if accuracy > highest:
            best, highest = probe, accuracy
    assert best is not None, "there is at least one strength"
    return best


def _minimise(inputs: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Weight and bias at the minimum, found from the given ones."""
    parameters = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=ITERATIONS, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(inputs, *parameters), labels)
        loss = loss + strength / 2 * parameters[0].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return parameters[0].detach(), parameters[1].detach()


def pool_pixels(images: Tensor) -> Tensor:
    """images: (n, channels, height, width). Returns (n, features), at most MAX_FEATURES of them."""
    channels, height, width = images.shape[1:]
    if channels * height * width > MAX_FEATURES:
        side = max(1, math.isqrt(MAX_FEATURES // channels))
        images = F.adaptive_avg_pool2d(images, (min(height, side), min(width, side)))
    return images.flatten(1)
