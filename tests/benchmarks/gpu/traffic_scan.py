"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.scan import causal_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "width", "channels"), [(128, 32, 32), (70, 40, 33), (5, 3, 2)])
def check_scan(length: int, width: int, channels: int, dtype: torch.dtype) -> None:
    q, k = (torch.rand(2, 1, length, width, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 1, length, channels).to(dtype).requires_grad_()
    before = torch.zeros(2, 1, width, channels + 1)
    with checked_traffic() as ran:
        y, last = causal_sums(q, k, v, torch.zeros(2, 1, length), before.requires_grad_(), torch.zeros(2, 1))
        (y.sum() + last.sum()).backward()
    assert sorted(ran) == [
        *["scan._carry_kernel"] * 3,
        *["scan._mix_kernel"] * 4,
        *["scan._sum_chunks_kernel"] * 3,
    ]
