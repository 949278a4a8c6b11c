"""The convolution of this folder in plain torch: the definition that the CPU and GPU kernels are held against.

One shifted view of the input per tap, weighted and added. Sums run in float32, or in float64 when x is.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:
    """y[b, t, c] = sum_k taps[(b, t,) head(c), k] * x[b, t - before + k, c]: (B, length, C)."""
    heads, count = taps.shape[-2:]
    rows = _by_head(_rows(x, -before, length + count - 1), heads).to(taps.dtype)
    total = rows[:, :length] * taps[..., 0, None]  # not zeros: torch.func.vmap adds no batch in place
    for k in range(1, count):
        total.addcmul_(rows[:, k : k + length], taps[..., k, None])
    return total.flatten(2).to(x.dtype)


def input_gradient(grad: Tensor, taps: Tensor, before: int, size: int) -> Tensor:
    """The gradient of x: (B, size, C). Output t passes taps[.., k] times its own gradient to input t - before + k."""
    heads, count = taps.shape[-2:]
    length = grad.shape[1]
    by_head = _by_head(grad, heads).to(taps.dtype)
    total = by_head.new_zeros(grad.shape[0], length + count - 1, *by_head.shape[2:])  # row r is input r - before
    for k in range(count):
        total[:, k : k + length].addcmul_(by_head, taps[..., k, None])
    return _rows(total.flatten(2), before, size).to(grad.dtype)


def tap_gradient(grad: Tensor, x: Tensor, before: int, taps_shape: Sequence[int]) -> Tensor:
    """The gradient of the taps: output gradients times inputs, summed over a head's channels (and B, T if shared)."""
    heads, count = taps_shape[-2:]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    length = grad.shape[1]
    rows = _by_head(_rows(x, -before, length + count - 1), heads).to(dtype)
    by_head = _by_head(grad, heads).to(dtype)
    summed = (0, 1, 3) if len(taps_shape) == 2 else (3,)
    return torch.stack([(by_head * rows[:, k : k + length]).sum(summed) for k in range(count)], -1)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis."""
    return logits.softmax(-1)


def softmax_gradient_(grad: Tensor, taps: Tensor) -> Tensor:
    """From the gradient of taps = softmax(logits) to that of the logits; overwrites and returns `grad`."""
    return grad.sub_((grad * taps).sum(-1, keepdim=True)).mul_(taps)


def _rows(x: Tensor, first: int, count: int) -> Tensor:
    """Rows first .. first + count - 1 of x (B, S, C), zeros outside."""
    return F.pad(x, (0, 0, -first, first + count - x.shape[1]))


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, x.shape[-1] // heads))
