"""Cross-entropy of words: sums over target tokens of a loss that is smoothed as in fairseq.

With V words, smoothing s and e = s / (V - 1), for a row of logits x, p = softmax(x), and its target w:

    nll                       -log p(w)
    loss                      (1 - s - e) nll + e sum_v -log p(v)
    gradient of the logits    p - e - (1 - s - e) [v = w]

`linear_cross_entropy` makes the logits of features itself, some tokens at a time, and the gradients of each such chunk
at once, while it is there: (tokens, V) never exists as a whole, in neither pass. Targets that are padding add nothing
to the sums and get no gradient. Sums and the softmax run in float32, or float64 when the features are.

float16 has no room for a gradient of the loss before the factor that a loss is multiplied with to keep its gradients in
range: there the backward pass makes the logits again, and rounds their gradients after that product.
"""

import torch
from torch import Tensor

from subquad.kernels.cross_entropy import reference
from subquad.kernels.cross_entropy.reference import chunk_rows as chunk_rows
from subquad.kernels.dispatch import choose


def linear_cross_entropy(
    features: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, pad: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sums of the loss and, without a gradient, of nll, for logits = features weight^T + bias.

    features: (n, C); weight: (V, C); bias: (V,) or None; target: (n,) int64, of which `pad` counts for nothing.
    Products run in the precision of autocast where that is on, else in that of the features.
    """
    assert features.shape[0] == target.shape[0], f"{features.shape[0]} rows of {target.shape[0]} targets"
    kernel = choose("cross_entropy", features)
    return kernel.linear_cross_entropy(features, weight, bias, target, pad, smoothing, _product_dtype(features))


def cross_entropy(logits: Tensor, target: Tensor, *, pad: int, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The same sums for logits (n, V) that are there."""
    assert logits.shape[0] == target.shape[0], f"{logits.shape[0]} rows of {target.shape[0]} targets"
    return reference.cross_entropy(logits, target, pad, smoothing)


def _product_dtype(features: Tensor) -> torch.dtype:
    """The dtype that a linear map would compute in: under autocast it is that of autocast."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return features.dtype
