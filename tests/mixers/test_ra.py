"""Randomized attention: what its draws mean, and that padding has no part in them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import build, noise
from subquad.testing import close, enlarge, tokens


def ra(**options: Any) -> Any:
    torch.manual_seed(0)
    mixer = build("ra", dim=16, heads=4, **options)
    enlarge(mixer)
    return mixer.eval()


def test_its_mean_over_draws_is_softmax_attention() -> None:
    """Exactly so if omega, around q_i + k_J with J drawn from the softmax, has variance sqrt(d); the mixer has 1."""
    mixer, x = ra(), 0.7 * tokens(1, 6, 0)
    q, k, v = mixer.project(x)
    expected = mixer.merge_heads(torch.nn.functional.scaled_dot_product_attention(q, k, v))
    width = mixer.config.head_width**0.25

    def draw(kind: noise.Kind, like: Tensor, shape) -> Tensor:
        drawn = noise.from_generator(kind, like, shape)
        return drawn * width if kind == "normal" else drawn

    mixer.train()
    torch.manual_seed(1)
    with noise.drawing_from(draw), torch.no_grad():
        mean = mixer(x.expand(20000, -1, -1)).y.mean(0)
    assert (mean - expected[0]).abs().max() < 0.03 * expected.square().mean().sqrt()


def test_the_sampled_proposal_adds_the_drawn_key() -> None:
    mixer, x = ra(proposal="sampled"), tokens(2, 5, 0)
    index = torch.randint(5, (2, 4, 5))
    with noise.drawing_from(lambda kind, like, shape: index):
        y = mixer(x).y
    q, k, v = mixer.project(x)
    omega = q + torch.stack([torch.stack([k[b, h, index[b, h]] for h in range(4)]) for b in range(2)])
    exponent = (omega @ k.transpose(-1, -2) - k.square().sum(-1)[:, :, None] / 2) / 2
    assert close(y, mixer.merge_heads(exponent.softmax(-1) @ v))


def test_padded_keys_are_never_drawn() -> None:
    mixer, x = ra(), tokens(1, 8, 0)
    padding = torch.arange(8)[None] >= 3
    drawn = []

    def record(kind: noise.Kind, like: Tensor, shape) -> Tensor:
        drawn.append(noise.from_generator(kind, like, shape))
        return drawn[-1]

    with noise.drawing_from(record):
        for _ in range(50):
            mixer(x, padding=padding)
    assert torch.stack(drawn).max() == 2


def test_draws_in_order_and_shape() -> None:
    """Evaluation draws the key only; training the key, then omega; the deterministic proposals omega alone."""
    x, asked = tokens(2, 5, 0), []

    def record(kind: noise.Kind, like: Tensor, shape) -> Tensor:
        asked.append((kind, tuple(shape)))
        return noise.from_generator(kind, like, shape)

    with noise.drawing_from(record):
        ra()(x)
        ra().train()(x)
        ra(proposal="mean")(x)
        ra(proposal="softmax").train()(x)
    key, omega = ("categorical", (2, 4, 5)), ("normal", (2, 4, 5, 4))
    assert asked == [key, key, omega, omega]


@pytest.mark.parametrize("call", [{"causal": True}, {"proposal": "median"}])
def test_refusals_at_build(call: dict) -> None:
    with pytest.raises(ValueError, match="ra"):
        ra(**call)


def test_it_cannot_read_a_context() -> None:
    with pytest.raises(ValueError, match="ra cannot read a context"):
        ra()(tokens(1, 3, 0), context=tokens(1, 4, 1))
