"""Logistic regression: perfect where a linear map is enough, and at the minimum that its equation states."""

import pytest
import torch
import torch.nn.functional as F

from subquad.evaluate.linear_probe import MAX_FEATURES, fit_linear_probe, pool_pixels

CLASSES = 3


def planted(count: int, seed: int, margin: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points whose class is the largest of three linear functions, by a margin."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 8, generator=generator)
    noise[:, :CLASSES] = 0.1 * noise[:, :CLASSES] + (3 + margin) * F.one_hot(labels, CLASSES)
    return 5 + 2 * noise, labels


def test_a_planted_linear_rule_is_found() -> None:
    probe = fit_linear_probe(*planted(200, 0), CLASSES, planted(50, 1))
    assert probe.accuracy(*planted(100, 2)) == 1


def test_without_a_rule_it_guesses() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(300, 5, generator=generator), torch.randint(2, (300,), generator=generator)) for _ in "abc"]
    probe = fit_linear_probe(*parts[0], 2, parts[1])
    assert 0.4 < probe.accuracy(*parts[2]) < 0.6


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_the_gradient_of_the_stated_loss_is_zero(strength: float) -> None:
    inputs, labels = planted(60, 0, margin=-3)
    inputs = inputs.double()
    probe = fit_linear_probe(inputs, labels, CLASSES, (inputs, labels), [strength])
    weight, bias = probe.weight.requires_grad_(), probe.bias.requires_grad_()
    logits = (inputs - probe.mean) / probe.scale @ weight.T + bias
    loss = -logits.log_softmax(1)[torch.arange(60), labels].mean() + strength / 2 * weight.square().sum()
    for gradient in torch.autograd.grad(loss, [weight, bias]):
        assert gradient.abs().max() < 1e-4


def test_the_strength_is_chosen_on_validation_data() -> None:
    train, valid = planted(200, 0), planted(100, 1)
    probes = [fit_linear_probe(*train, CLASSES, valid, [strength]) for strength in (1.0, 0.1, 0.001)]
    best = fit_linear_probe(*train, CLASSES, valid, (1.0, 0.1, 0.001))
    assert best.accuracy(*valid) == max(probe.accuracy(*valid) for probe in probes)


def test_it_is_the_same_every_time() -> None:
    first, second = (fit_linear_probe(*planted(50, 0), CLASSES, planted(20, 1)) for _ in range(2))
    assert torch.equal(first.weight, second.weight)


def test_large_images_are_averaged() -> None:
    small = torch.rand(2, 3, 32, 32)
    assert torch.equal(pool_pixels(small), small.flatten(1))
    large = torch.rand(2, 3, 64, 64)
    pooled = pool_pixels(large)
    assert pooled.shape == (2, MAX_FEATURES)
    assert torch.allclose(pooled[0, 0], large[0, 0, :2, :2].mean())
