"""Run by `test_traffic.py`, in Triton's interpreter."""

import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.tokens_at import tokens_at


def check_tokens_at() -> None:
    x = torch.randn(2, 37, 300, requires_grad=True)
    positions = torch.stack([torch.arange(9) * 4, torch.arange(9) // 3])
    with checked_traffic() as ran:
        same, tokens = tokens_at(x, positions)
        (same.sum() + tokens.sum()).backward()
    assert ran == ["tokens_at.add_tokens"]
