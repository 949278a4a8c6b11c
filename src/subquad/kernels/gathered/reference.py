"""Attention and convolution over entries of other rows in plain torch: the definition."""

import torch
from torch import Tensor


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
    """See the public function. Entries are gathered for every row: (rows, places, heads, d)."""
    places = torch.arange(k.shape[2] if order.shape[1] == 1 else order.shape[1], device=q.device)
    keys, values = (part.transpose(1, 2)[order, places] for part in (k, v))
    scores = torch.einsum("rhd,rjhd->rhj", q * q.shape[-1] ** -0.5, keys)
    scores = scores.masked_fill((places >= lengths[:, None])[:, None], -float("inf"))
    return torch.einsum("rhj,rjhd->rhd", scores.softmax(-1), values)


def gathered_conv(x: Tensor, taps: Tensor, order: Tensor, first: int) -> Tensor:
    """See the public function. Entries are gathered for every row: (rows, K, C)."""
    heads, count = taps.shape[-2:]
    entries = x[order, torch.arange(first, first + count, device=x.device)].unflatten(-1, (heads, -1))
    return torch.einsum("rhk,rkhc->rhc", taps.expand(len(order), -1, -1).to(x.dtype), entries).flatten(1)
