"""Zeros at padded positions, whichever way they are written."""

import pytest
import torch

from subquad.mixers.layout import MANY_VALUES, zero_padding


@pytest.mark.parametrize("channels", [4, MANY_VALUES // 16])
def test_padded_positions_become_zeros_and_get_no_gradient(channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, channels)
    padding = torch.arange(7) >= torch.tensor([7, 2, 0])[:, None]
    x[1, 3:] = torch.nan  # what is ignored may be anything
    given = x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # not contiguous
    y = zero_padding(given, padding)
    assert torch.equal(y, torch.where(padding[..., None], torch.zeros(()), x))
    (gradient,) = torch.autograd.grad(y, given, torch.ones_like(y))
    assert torch.equal(gradient, padding.logical_not()[..., None].float().expand_as(x))
    assert zero_padding(x, None) is x
