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


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Four 32-bit numbers: Philox4x32 with 7 rounds, in whole numbers."""
    (a, b, c, d), (first, second), most = counter, key, 2**32
    for _ in range(7):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = two // most ^ b ^ first, two % most, one // most ^ d ^ second, one % most
        first, second = (first + 0x9E3779B9) % most, (second + 0xBB67AE85) % most
    return [a, b, c, d]


def test_values_are_dropped_by_numbers_that_count() -> None:
    """By 16 bits each of Philox, which the generator gives a seed; its first block is that of Random123's own tests."""
    assert philox((0, 0, 0, 0), (0, 0)) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    torch.manual_seed(3)
    seed = torch.empty((), dtype=torch.int64).random_(-(2**63), None).item()
    seed, draws = int(seed) % 2**64, []
    for step in range(3):
        blocks = [philox((16 * step + lane, 0, 0, 0), (seed % 2**32, seed // 2**32)) for lane in range(16)]
        draws += [half for part in range(4) for block in blocks for half in divmod(block[part], 2**16)[::-1]]
    torch.manual_seed(3)
    kept = dropout(torch.ones(301), 0.25, training=True) != 0
    assert kept.tolist() == [draw >= 2**14 for draw in draws[:301]]


def test_the_gradient_of_a_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = dropout(x, 0.3, training=True)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second * x.detach(), gradient.detach())


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
