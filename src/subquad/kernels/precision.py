"""What is computed in float32 even where a model works in half precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Statistics (maxima, sums of exponentials, norms) are kept in float32, or in float64 when x is."""
    return x if x.dtype == torch.float64 else x.float()


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """A block in which autocast does not lower the precision of what was raised by `at_least_float32`."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x.device) else nullcontext()


def is_autocast(device: torch.device) -> bool:
    """Whether autocast chooses the precision of products on a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_once(x: Tensor) -> Tensor:
    """x as autocast gives it to products, for those who multiply it more than once: autocast would cast it each time.

    A CPU, where a cast is little beside a product, goes on adding the gradients of these products in float32.
    """
    return x if x.device.type == "cpu" else x.to(product_dtype(x))


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision in which x is multiplied: that of autocast, if it chooses, or its own."""
    if x.dtype == torch.float64 or not is_autocast(x.device):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
