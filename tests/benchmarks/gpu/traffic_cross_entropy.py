"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "vocab", "launches"), [(torch.float32, 37, 1), (torch.float16, 37, 2), (torch.float32, 9000, 1)]
)
def check_row_loss(dtype: torch.dtype, vocab: int, launches: int, bias: bool) -> None:
    features, weight = (torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (3, vocab))
    words = torch.randn(vocab, requires_grad=True) if bias else None
    with checked_traffic() as ran:
        total, _ = linear_cross_entropy(features, weight, words, torch.tensor([0, 2, 5]), pad=1, smoothing=0.1)
        total.backward()
    assert ran == ["cross_entropy._row_loss"] * launches
