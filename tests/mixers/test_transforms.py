"""torch.func.grad, vmap and jvp, and backward passes that are differentiated, for every mechanism."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad import mixers
from subquad.kernels.dispatch import VARIABLE

CASES = [
    (name, causal)
    for name in mixers.available()
    if name != "ra"  # every call draws samples, also in eval mode
    for causal in (False, True)
    if (mixers.mixer_class(name).capabilities.causal if causal else mixers.mixer_class(name).capabilities.bidirectional)
]
FUSED_BY_TORCH = ("softmax", "linformer")


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'causal' if case[1] else 'bidirectional'}")
def mixer(request: pytest.FixtureRequest) -> mixers.Mixer:
    name, causal = request.param
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_length": 16} if name == "linformer" else {}
    return mixers.build(name, dim=8, heads=2, causal=causal, **options).double().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(
    mixer: mixers.Mixer, x: Tensor, weights: dict[str, Tensor] | None = None, padding: Tensor | None = None
) -> Tensor:
    y = mixer(x, padding=padding).y if weights is None else functional_call(mixer, weights, (x,)).y
    return (y * torch.arange(8, device=x.device)).square().sum()


def close(ours: Tensor, other: Tensor) -> None:
    assert (ours - other).abs().max() <= 1e-9 * max(1.0, float(other.abs().max()))


def test_gradients(mixer: mixers.Mixer, x: Tensor) -> None:
    weights = dict(mixer.named_parameters())
    for_weights, for_x = grad(lambda weights, x: loss(mixer, x, weights), argnums=(0, 1))(weights, x)
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(loss(mixer, given), [given, *weights.values()], allow_unused=True)
    close(for_x, expected[0])
    for name, one in zip(weights, expected[1:], strict=True):
        close(for_weights[name], torch.zeros_like(weights[name]) if one is None else one)


def test_gradients_of_each_sample(mixer: mixers.Mixer, x: Tensor) -> None:
    weights = {name: value.detach() for name, value in mixer.named_parameters()}
    of_sample = grad(lambda weights, sample: loss(mixer, sample[None], weights))
    ours = vmap(of_sample, in_dims=(None, 0))(weights, x)
    for number, sample in enumerate(x):
        for name, value in of_sample(weights, sample).items():
            close(ours[name][number], value)


def test_batches_of_batches(mixer: mixers.Mixer, x: Tensor) -> None:
    with torch.no_grad():
        close(vmap(lambda one: mixer(one[None]).y[0])(x), mixer(x).y)


@pytest.mark.parametrize("mode", ["torch.func.jvp", "dual tensors"])
def test_derivatives_in_a_direction(mixer: mixers.Mixer, x: Tensor, mode: str) -> None:
    """Against a difference quotient; a kernel without rules for it would give zeros, or nothing."""
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    if mode == "torch.func.jvp":
        y, ours = jvp(lambda x: mixer(x).y, (x,), (direction,))  # type: ignore[misc]
    else:
        with torch.autograd.forward_ad.dual_level():
            dual = mixer(torch.autograd.forward_ad.make_dual(x, direction)).y
            y, ours = torch.autograd.forward_ad.unpack_dual(dual)
    with torch.no_grad():
        close(y, mixer(x).y)
        step = 1e-5
        quotient = (mixer(x + step * direction).y - mixer(x - step * direction).y) / (2 * step)
    assert ours is not None
    assert (ours - quotient).abs().max() <= 1e-6 * max(1.0, float(quotient.abs().max()))


@pytest.mark.parametrize("padded", [False, True])
def test_backward_passes_are_differentiated(
    mixer: mixers.Mixer, x: Tensor, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own fused attention cannot: its plain form is asked for by its own context."""
    padding = torch.arange(12) >= torch.tensor([[12], [7], [9]]) if padded else None

    def second(x: Tensor) -> list[Tensor | None]:
        given = x.clone().requires_grad_()
        weights = list(mixer.parameters())
        first = torch.autograd.grad(
            loss(mixer, given, padding=padding), [given, *weights], create_graph=True, allow_unused=True
        )
        total = sum((one.square().sum() for one in first if one is not None), torch.zeros((), dtype=x.dtype))
        return list(torch.autograd.grad(total, [given, *weights], allow_unused=True))

    if mixer.name in FUSED_BY_TORCH:
        with pytest.raises(RuntimeError, match=r"scaled_dot_product.*not implemented"):
            second(x)
    with sdpa_kernel(SDPBackend.MATH):
        ours = second(x)
        monkeypatch.setenv(VARIABLE, "reference")
        expected = second(x)
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            close(one, other)
