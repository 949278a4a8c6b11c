"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.window_attention import Summaries, Windows, window_attention


@pytest.mark.parametrize(
    ("windows", "dtype", "bias", "count", "chunk"),
    [
        (Windows((10,), 5), torch.bfloat16, 0, 0, 0),
        (Windows((36,), 18, 9, 9), torch.float32, 1, 3, 0),
        (Windows((36,), 18, 18, 0, causal=True), torch.float32, 1, 6, 6),
        (Windows((40,), 20, causal=True), torch.bfloat16, 0, 20, 2),
        (Windows((6, 4), 2, 1, 1), torch.float32, 1, 2, 0),
    ],
    ids=["windows", "looking around", "looking back, causal", "chunks", "grid"],
)
def check_window_attention(windows: Windows, dtype: torch.dtype, bias: int, count: int, chunk: int) -> None:
    axes, cells = len(windows.shape), torch.Size(windows.shape).numel()
    qkv = torch.randn(1, cells, 3, 1, 3, dtype=dtype, requires_grad=True)
    table = torch.randn(1, windows.size**axes, windows.keys**axes, requires_grad=True) if bias else None
    summaries = None
    if count:
        k, v = torch.randn(2, 1, 1, count, 3, requires_grad=True).unbind(0)
        summaries = Summaries(k, v.to(dtype), None, chunk)
    with checked_traffic() as ran:
        window_attention(qkv, windows, table, torch.ones(1, cells, dtype=torch.bool), summaries).sum().backward()
    assert len(ran) == 3 + bool(bias) + bool(count)
