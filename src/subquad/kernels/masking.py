"""How logits are taken out of a softmax. A mask is True where an entry is kept."""

import torch
from torch import Tensor

MASK_VALUE = torch.finfo(torch.float32).min
"""A logit that no softmax gives weight. It is finite, so that a row without any entry to keep stays finite as well."""


def keep(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with MASK_VALUE where the mask, which is broadcast to them, is False; None keeps all."""
    return logits if mask is None else logits.masked_fill(mask.logical_not(), MASK_VALUE)
