"""Convolution over time whose taps are shared by the channels of a head.

    out[b, t, c] = sum_k taps[(b, t,) head(c), k] * x[b, t - before + k, c]        head(c) = c // (C / H), zeros outside

taps: (H, K), the same at every position, or (B, T, H, K), each position's own. Sums run in the wider of the two
precisions; results come back in that of x. Neither form keeps K copies of x for backward.
"""

import torch.nn.functional as F
from torch import Tensor


def tap_conv(x: Tensor, taps: Tensor, before: int) -> Tensor:
    """The equation above. x: (B, T, C); before: how many taps lie before the current position, 0 .. K - 1."""
    after = taps.shape[-1] - 1 - before
    assert before >= 0, before
    assert after >= 0, f"{before} taps before the current position, of {taps.shape[-1]}"
    return tap_conv_extended(F.pad(x, (0, 0, before, after)), taps)


def tap_conv_extended(extended: Tensor, taps: Tensor) -> Tensor:
    """The same for an input that brings its neighbours along: (B, T + K - 1, C) -> (B, T, C).

    Output t reads entries t .. t + K - 1, so a stream passes its last K - 1 inputs and then the new ones.
    """
    assert extended.shape[-1] % taps.shape[-2] == 0, (extended.shape, taps.shape)
    return _shared_taps(extended, taps) if taps.dim() == 2 else _own_taps(extended, taps)


def _shared_taps(extended: Tensor, taps: Tensor) -> Tensor:
    """A depthwise convolution; torch's kernels sum low precisions in float32 by themselves."""
    channels = extended.shape[-1]
    filters = taps.to(extended.dtype).repeat_interleave(channels // taps.shape[0], dim=0)
    return F.conv1d(extended.transpose(1, 2), filters[:, None], groups=channels).transpose(1, 2)


def _own_taps(extended: Tensor, taps: Tensor) -> Tensor:
    """One shifted view of the input per tap, weighted and added: autograd keeps views, not copies."""
    _, time, heads, count = taps.shape
    assert extended.shape[1] == time + count - 1, (extended.shape, taps.shape)
    by_head = extended.unflatten(-1, (heads, -1))
    # unbind, not taps[..., k]: its gradient is one stack instead of `count` padded tensors
    weights = taps[..., None, :].unbind(-1)
    total = by_head[:, :time] * weights[0]
    for k in range(1, count):
        total = total + by_head[:, k : k + time] * weights[k]
    return total.flatten(2).to(extended.dtype)
