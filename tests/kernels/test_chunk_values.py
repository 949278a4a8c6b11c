"""Values of chunks: both implementations against the equation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.kernels.chunk_values import chunk_values, cpu
from subquad.kernels.dispatch import VARIABLE
from subquad.testing import close
from tests.kernels.memory import poisoned_memory


def values_by_definition(qkv: Tensor, w: Tensor, mask: Tensor | None, size: int | Tensor) -> Tensor:
    """Chunk by chunk, row by row."""
    u = []
    for row, (_, k, v) in enumerate(part.unbind(1) for part in qkv):
        own = int(size[row]) if isinstance(size, Tensor) else size
        rows = mask[row if mask.shape[0] > 1 else 0] if mask is not None else torch.ones(len(k), dtype=torch.bool)
        for chunk in range(w.shape[2]):
            member = rows & (torch.arange(len(k)) // own == chunk)
            keys, values, query = k[member], v[member], w[row, :, chunk]
            logits = k.shape[-1] ** -0.5 * ((keys * query).sum(-1) - keys.square().sum(-1) / 2)
            u.append((logits.softmax(0)[..., None] * values).sum(0))
    return torch.stack(u).view(qkv.shape[0], w.shape[2], *w.shape[1:2], -1).transpose(1, 2)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("ragged", [False, True], ids=["one size", "a size for each row"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 23), st.booleans(), st.integers(0, 99))
def test_by_definition(name: str, ragged: bool, batch: int, chunks: int, time: int, masked: bool, seed: int) -> None:
    """The last chunk may be short, chunks may be empty, and positions may lie beyond the last chunk."""
    torch.manual_seed(seed)
    qkv = torch.randn(batch, time, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    size = torch.randint(1, time + 1, (batch,)) if ragged else -(-time // chunks)
    w = torch.randn(batch, 2, chunks, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(batch, time) < 0.6 if masked else None
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setenv(VARIABLE, name)
        ours, definition = chunk_values(qkv, w, mask, size)[1], values_by_definition(qkv, w, mask, size)
        upstream = torch.randn_like(ours)
        gradients = torch.autograd.grad(ours, [qkv, w], upstream), torch.autograd.grad(definition, [qkv, w], upstream)
    assert close(ours, definition, 1e-12)
    for one, other in zip(*gradients, strict=True):
        assert close(one, other, 1e-12)


@pytest.mark.parametrize("sizes", [None, torch.tensor([2, 3])], ids=["one size", "a size for each row"])
def test_opcheck(sizes: Tensor | None) -> None:
    torch.manual_seed(0)
    qkv, w = torch.randn(2, 8, 3, 2, 4, requires_grad=True), torch.randn(2, 2, 4, 4, requires_grad=True)
    torch.library.opcheck(cpu._forward, (qkv, w, torch.rand(2, 8) < 0.8, sizes, 2, True))
