"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.conv import tap_conv, tap_conv_extended


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["shared", "own", "logits"])
@pytest.mark.parametrize(("length", "width", "count", "before"), [(70, 64, 5, 4), (33, 70, 4, 1), (3, 8, 7, 6)])
def check_conv(length: int, width: int, count: int, before: int, kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, length, 2 * width, dtype=dtype, requires_grad=True)
    taps = torch.randn(*(() if kind == "shared" else (2, length)), 2, count, dtype=dtype, requires_grad=True)
    with checked_traffic() as ran:
        tap_conv(x, taps, before, softmax=kind == "logits").sum().backward()
    assert sorted(ran) == ["conv._convolve", "conv._convolve", "conv._tap_products"]


def check_extended_conv() -> None:
    x, taps = torch.randn(2, 40, 16, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    with checked_traffic():
        tap_conv_extended(x, taps).sum().backward()
