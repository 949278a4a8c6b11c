"""Dropout with 16 random bits for each value.

torch's own draws a double for each on the CPU, which took a tenth of a small model's training step on one thread, and
does not become faster with more of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import tracing

LEVELS = 2**16
LEAST = -(2**63)


def dropout(x: Tensor, rate: float) -> Tensor:
    """x with values set to 0 at random, each with chance `rate` (to 1/65536), the others scaled to keep the mean."""
    if x.device.type != "cpu" or tracing.is_tracing():
        return F.dropout(x, rate)
    dropped = round(rate * LEVELS)
    # from the least number to none: all 64 bits are drawn
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(LEAST, None)
    draws = words.view(torch.int16)[: x.numel()].view(x.shape)
    kept = (draws >= dropped - LEVELS // 2).to(x.dtype)
    return x * kept.mul_(LEVELS / max(1, LEVELS - dropped))
