"""Ways to compute the convolution of lightconv and dynamicconv: ours, and those of the original programs.

    y[b, t, c] = sum_k taps[(b, t,) head(c), k] x[b, t - (K - 1) + k, c]          causal; zeros before the sequence

x: (B, T, C); taps: (H, K), or (B, T, H, K). Every function here is differentiable in x and taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.conv import tap_conv


def ours(x: Tensor, taps: Tensor) -> Tensor:
    return tap_conv(x, taps, taps.shape[-1] - 1)


def ours_from_logits(x: Tensor, logits: Tensor) -> Tensor:
    """The same with the softmax over the taps inside, as dynamicconv calls it."""
    return tap_conv(x, logits, logits.shape[-1] - 1, softmax=True)


def unfold(x: Tensor, taps: Tensor) -> Tensor:
    """K shifted copies of the input, then one product for each position and head."""
    batch, time, channels = x.shape
    heads, count = taps.shape[-2:]
    copies = F.pad(x, (0, 0, count - 1, 0)).unfold(1, count, 1).reshape(batch * time * heads, channels // heads, count)
    weights = taps.expand(batch, time, heads, count).reshape(batch * time * heads, count, 1)
    return torch.bmm(copies, weights).view(batch, time, channels)


def band(x: Tensor, taps: Tensor) -> Tensor:
    """A T x T matrix for each row and head, with the taps along its diagonals, times the input."""
    batch, time, channels = x.shape
    heads, count = taps.shape[-2:]
    width = time + count - 1
    weights = taps.expand(batch, time, heads, count).transpose(1, 2).reshape(batch * heads, time, count)
    matrix = weights.new_zeros(batch * heads, time, width)
    # row t of this view begins at column t
    matrix.as_strided((batch * heads, time, count), (time * width, width + 1, 1)).copy_(weights)
    values = x.view(batch, time, heads, -1).transpose(1, 2).reshape(batch * heads, time, -1)
    y = torch.bmm(matrix[:, :, count - 1 :], values)
    return y.view(batch, heads, time, -1).transpose(1, 2).reshape(batch, time, channels)


def depthwise(x: Tensor, taps: Tensor) -> Tensor:
    """torch's grouped convolution, a group for each channel. x and the result: (B, C, T), the layout it likes best."""
    channels, time = x.shape[1:]
    count = taps.shape[-1]
    filters = taps.repeat_interleave(channels // taps.shape[0], 0)[:, None]
    return F.conv1d(x, filters, padding=count - 1, groups=channels)[..., :time]


def by_heads(x: Tensor, taps: Tensor) -> Tensor:
    """torch's grouped convolution, a group for each head, its channels folded into the batch. x: (B, R, H, T)."""
    heads, count = taps.shape
    time = x.shape[-1]
    y = F.conv1d(x.flatten(0, 1), taps[:, None], padding=count - 1, groups=heads)[..., :time]
    return y.unflatten(0, x.shape[:2])


def exact(x: Tensor, taps: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y and the gradients of x and of taps, in float64, by the equation."""
    x, taps, upstream = x.double(), taps.double(), upstream.double()
    heads, count = taps.shape[-2:]
    own = taps.dim() == 4
    by_head = F.pad(x, (0, 0, count - 1, 0)).unflatten(-1, (heads, -1))
    upstream = upstream.unflatten(-1, (heads, -1))
    time = x.shape[1]
    y, x_gradient, tap_gradient = torch.zeros_like(upstream), torch.zeros_like(by_head), torch.zeros_like(taps)
    for k in range(count):
        weight = taps[..., k, None]
        y.addcmul_(weight, by_head[:, k : k + time])
        x_gradient[:, k : k + time].addcmul_(weight, upstream)
        products = (upstream * by_head[:, k : k + time]).sum(-1)
        tap_gradient[..., k] = products if own else products.sum((0, 1))
    return y.flatten(2), x_gradient[:, count - 1 :].flatten(2), tap_gradient
