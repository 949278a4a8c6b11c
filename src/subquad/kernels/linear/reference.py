"""Linear maps of a few rows in plain torch: the definition."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_LARGEST = 127


def largest_input(width: int) -> int:
    """The largest integer that inputs are rounded to: sums of `width` products stay below 2^31."""
    return min(2**15 - 1, (2**31 - 1) // (INT8_LARGEST * width))


def linear_by(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> (..., out), of weight (out, in) and bias (out,)."""
    return lambda x: F.linear(x, weight, bias)


def int8_linear_by(values: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (..., in) float32 -> (..., out), of values (out, in) int8, scale and bias (out,) float32.

    Floats hold the integers; from 2^24 on their sums are rounded.
    """

    def linear(x: Tensor) -> Tensor:
        x_scale = x.abs().amax(-1, keepdim=True) / largest_input(x.shape[-1])
        whole = (x / x_scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
        y = F.linear(whole, values.float()) * (x_scale * scale)
        return y if bias is None else y + bias

    return linear
