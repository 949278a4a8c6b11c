"""Run by `test_traffic.py`, in Triton's interpreter."""

from collections import Counter

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.feature_attention import feature_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "width", "features", "masked", "learns", "dtype"),
    [(70, 33, 40, True, True, torch.float32), (128, 16, 64, False, False, torch.bfloat16)],
)
def check_feature_attention(
    length: int, width: int, features: int, masked: bool, learns: bool, causal: bool, dtype: torch.dtype
) -> None:
    qkv = torch.randn(1, length, 3, 2, width).to(dtype).requires_grad_()
    matrix = torch.randn(2, features, width, requires_grad=learns)
    mask = torch.ones(1, length, dtype=torch.bool) if masked else None
    with checked_traffic() as ran:
        feature_attention(qkv, matrix, mask, 1e-4, 1e-2, causal=causal).float().square().sum().backward()
    own = ("sum_keys", "read_sums", "sum_queries", "query_gradients", "key_gradients")
    expected = Counter(f"feature_attention.{name}" for name in own)
    assert Counter(ran) == expected + Counter({"scan._carry_kernel": 4 if causal else 2})
