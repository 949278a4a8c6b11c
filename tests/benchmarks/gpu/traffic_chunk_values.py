"""Run by `test_traffic.py`, in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.interpreted import checked_traffic
from subquad.kernels.chunk_values import chunk_means, chunk_values


@pytest.mark.parametrize(("size", "masked"), [(7, False), (3, True), (torch.tensor([5, 4]), True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def check_chunk_values(size: int | torch.Tensor, masked: bool, dtype: torch.dtype) -> None:
    """The positions of the last chunk may be fewer; some may belong to no chunk."""
    qkv, w = torch.randn(2, 17, 3, 1, 3, dtype=dtype, requires_grad=True), torch.randn(2, 1, 5, 3, requires_grad=True)
    mask = torch.ones(2, 17, dtype=torch.bool) if masked else None
    with checked_traffic() as ran:
        passed_on, *means = chunk_means(qkv, mask, size, torch.ones(1, 5, dtype=torch.int64))
        passed_on, u = chunk_values(passed_on, w, mask, size)
        torch.autograd.backward([one.float().sum() for one in (passed_on, *means, u)])
    assert [name.removeprefix("chunk_values.") for name in ran] == [
        "means_of_members", "average", "add_gradients", "add_to_members"
    ]  # fmt: skip
