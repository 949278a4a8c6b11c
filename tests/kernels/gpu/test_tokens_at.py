"""The Triton kernel of tokens at chosen positions, in the interpreter against torch's own, and as compilers see it."""

import pytest
import torch

from subquad.kernels.tokens_at import reference, tokens_at
from tests.kernels.gpu.compiling import TARGETS, compile_launches
from tests.kernels.gpu.interpreter import assert_near, needs_triton, tolerance_of

pytestmark = needs_triton

POSITIONS = {
    "some positions": lambda time: torch.arange(0, time, 3),
    "several tokens of a position": lambda time: torch.arange(5 * time) // 5,
    "all of the last": lambda time: torch.full((4,), time - 1),
    "more than a block of them": lambda time: torch.arange(600) * time // 600,
}


@pytest.mark.parametrize("time", [1, 16, 37])
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def check_gradient(poisoned, monkeypatch, dtype, kind, time):
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    positions = torch.stack([POSITIONS[kind](time)] * 2)
    positions[1] = positions[1].clamp(max=time // 2)
    x, grad = (torch.randn(2, time, 5).to(dtype) for _ in range(2))
    x.requires_grad_()
    grad_tokens = torch.randn(*positions.shape, 5).to(dtype)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(
        reference.tokens_at(exact, positions), exact, (grad.double(), grad_tokens.double())
    )
    same, tokens = tokens_at(x, positions)
    assert torch.equal(same, x)
    assert torch.equal(tokens, reference.tokens_at(x, positions)[1])
    (found,) = torch.autograd.grad((same, tokens), x, (grad, grad_tokens))
    assert found.dtype == dtype
    assert_near(found, expected, tolerance_of(dtype))


def check_one_of_both_gradients_and_second_ones(poisoned, monkeypatch):
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    x, positions = torch.randn(2, 9, 3, requires_grad=True), torch.tensor([[0, 0, 8], [1, 2, 2]])
    same, tokens = tokens_at(x, positions)
    assert torch.equal(torch.autograd.grad(same.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    assert torch.autograd.grad(tokens.sum(), x)[0].sum() == tokens.numel()
    results = []
    for kernels in ("gpu", "reference"):
        monkeypatch.setenv("SUBQUAD_KERNELS", kernels)
        same, tokens = tokens_at(x, positions)
        (first,) = torch.autograd.grad(same.pow(3).sum() + tokens.pow(2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=() if t == "sm_80" else pytest.mark.nightly) for t in TARGETS]
)
def test_compiles(target: str, triton_cache: None) -> None:
    from subquad.kernels.tokens_at import gpu

    grad = torch.empty(32, 512, 512, dtype=torch.bfloat16, device="meta")
    tokens = torch.empty(32, 300, 512, device="meta")
    with compile_launches(target) as launches:
        gpu._add_tokens._init_fn(grad, tokens, torch.empty(32, 300, dtype=torch.int64, device="meta"))
    (launch,) = launches
    assert launch.spilled_bytes == 0, launch
    assert launch.occupancy >= 0.25, launch
