"""Values of chunks: both implementations against the equation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.kernels.chunk_values import chunk_values, cpu
from subquad.kernels.dispatch import VARIABLE
from subquad.kernels.masking import MASK_VALUE
from subquad.testing import close
from tests.kernels.memory import poisoned_memory


def values_by_definition(qkv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    chunks, scale = w.shape[2], qkv.shape[-1] ** -0.5
    k, v = (part.transpose(1, 2).unflatten(2, (chunks, -1)) for part in qkv.unbind(2)[1:])
    logits = scale * ((k * w.unsqueeze(3)).sum(-1) - k.square().sum(-1) / 2)
    if mask is None:
        return (logits.softmax(-1).unsqueeze(-1) * v).sum(-2)
    cells = mask.unflatten(1, (chunks, -1))[:, None]
    return (logits.masked_fill(~cells, MASK_VALUE).softmax(-1).mul(cells).unsqueeze(-1) * v).sum(-2)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_by_definition(name: str, batch: int, chunks: int, cells: int, masked: bool, seed: int) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(batch, chunks * cells, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(batch, 2, chunks, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(batch, chunks * cells) < 0.6 if masked else None
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setenv(VARIABLE, name)
        ours, definition = chunk_values(qkv, w, mask), values_by_definition(qkv, w, mask)
        upstream = torch.randn_like(ours)
        gradients = torch.autograd.grad(ours, [qkv, w], upstream), torch.autograd.grad(definition, [qkv, w], upstream)
    assert close(ours, definition, 1e-12)
    for one, other in zip(*gradients, strict=True):
        assert close(one, other, 1e-12)


def test_opcheck() -> None:
    torch.manual_seed(0)
    qkv, w = torch.randn(2, 8, 3, 2, 4, requires_grad=True), torch.randn(2, 2, 4, 4, requires_grad=True)
    torch.library.opcheck(cpu._forward, (qkv, w, torch.rand(2, 8) < 0.8, True))
