"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.scan import causal_sums


@pytest.mark.parametrize(("length", "width", "channels"), [(128, 32, 32), (70, 40, 33), (5, 3, 2)])
def check_scan(length: int, width: int, channels: int) -> None:
    q, k = (torch.rand(2, 1, length, width, requires_grad=True) for _ in range(2))
    v, before = torch.randn(2, 1, length, channels, requires_grad=True), torch.zeros(2, 1, width, channels)
    with checked_traffic() as ran:
        y, last = causal_sums(q, k, v, torch.zeros(2, 1, length), before.requires_grad_(), torch.zeros(2, 1))
        (y.sum() + last.sum()).backward()
    assert sorted(ran) == ["scan._carry"] * 3 + ["scan._mix"] * 4
