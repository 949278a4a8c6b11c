"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.primal_scores import primal_scores


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "width", "rank", "padded", "dtype"),
    [(70, 33, 5, True, torch.float32), (128, 16, 30, False, torch.bfloat16)],
)
def check_primal_scores(length: int, width: int, rank: int, padded: bool, causal: bool, dtype: torch.dtype) -> None:
    qk = torch.randn(2, length, 2, 1, width).to(dtype).requires_grad_()
    weights = torch.randn(1 if causal else 2, 2, 1, width, rank, requires_grad=True)
    lengths = torch.tensor([length, 3]) if padded else None
    with checked_traffic() as ran:
        scores, squares = primal_scores(qk, weights, lengths, causal=causal)
        (scores.float().sum() + squares.sum()).backward()
    own = ["primal_scores.project", "primal_scores.score_gradients"]
    if causal:
        own += ["primal_scores.score_gradients", "primal_scores.sum_chunks", *["scan._carry_kernel"] * 2]
    assert sorted(ran) == own
