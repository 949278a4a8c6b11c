"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.landmark_attention import OptWeights, gpu, landmark_attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("time", "programs", "dtype"), [(70, 2, torch.float32), (37, 6, torch.bfloat16)])
def check_landmark_attention(
    time: int, programs: int, dtype: torch.dtype, weighted: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    qkv = torch.randn(2, time, 3, 1, 5, dtype=dtype, requires_grad=True)
    w, f = torch.randn(2, 2, 1, 3, 5, requires_grad=True).unbind(0)
    b, balance = torch.rand(2, 2, 1, 3, 1, requires_grad=True).unbind(0)
    opt = OptWeights(f, balance, torch.full((1, 3), 1 / 3), 1.0) if weighted else None
    mask = torch.ones(2, time, dtype=torch.bool) if masked else None
    with checked_traffic() as ran:
        landmark_attention(qkv, w, w, b, opt, mask).sum().backward()
    names = ["summarise", "combine", "attend", "query_gradients", "query_gradients", "key_gradients"]
    assert ran == [f"landmark_attention.{name}" for name in names]
