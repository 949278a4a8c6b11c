"""Dropout: chances, scale, gradients, and draws that follow torch's generator."""

import pytest
import torch

from subquad.kernels.dropout import dropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_dropped_with_their_chance_and_the_mean_is_kept(rate: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(251, 401, dtype=dtype)
    y = dropout(x, rate, training=True)
    zeros = (y == 0).double().mean().item()
    deviation = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(zeros - rate) < 5 * deviation
    kept = y[y != 0].unique()
    assert len(kept) == 1
    assert kept.item() == pytest.approx(1 / (1 - rate), rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
    for part in (y[:, ::2], y[::2], y[:, 3::4]):  # no pattern in the order of the bits
        share = (part == 0).double().mean().item()
        assert abs(share - rate) < 6 * (rate * (1 - rate) / part.numel()) ** 0.5


def test_gradients_follow_the_mask() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, requires_grad=True)
    y = dropout(x, 0.3, training=True)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), y.detach())


def test_draws_follow_the_generator_and_evaluation_draws_nothing() -> None:
    x = torch.randn(3, 3)
    torch.manual_seed(1)
    first = dropout(x, 0.5, training=True)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5, training=True), first)
    before = torch.get_rng_state()
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0, training=True) is x
    assert torch.equal(torch.get_rng_state(), before)
    assert dropout(torch.empty(0, 4), 0.5, training=True).shape == (0, 4)
