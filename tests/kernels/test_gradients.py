"""Every implementation of every operation against the reference in float64: the results and all gradients."""

import importlib.util

import pytest
import torch
from torch import Tensor

from subquad.kernels import dispatch
from subquad.kernels.scan import causal_sums
from tests.kernels.memory import poisoned_memory
from tests.kernels.problems import Problem, every_problem

PROBLEMS = every_problem()
RANDOM = {"dropout"}
"""Two calls of such an operation differ; test_dropout.py has its gradient."""


def implementations(operation: str) -> list[str]:
    """Those that run here. gpu/test_interpreted.py has those of GPUs."""
    found = importlib.util.find_spec(f"subquad.kernels.{operation}.cpu")
    return ["reference"] if found is None else ["reference", "cpu"]


def results(problem: Problem, name: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and the gradients of all inputs, given gradients of all outputs."""
    inputs = [t.to(dtype).requires_grad_(problem.differentiable) for t in problem.inputs]
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setenv(dispatch.VARIABLE, name)
        found = problem.run(*inputs)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        if not problem.differentiable:
            return outputs
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]


def assert_near(found: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        error = (one.double() - other.double()).abs().max()
        assert error <= tolerance * max(1.0, other.abs().max().item())  # false for NaN


CASES = [(problem, name) for problem in PROBLEMS for name in implementations(problem.operation)]


@pytest.mark.parametrize(("problem", "name"), CASES, ids=[f"{problem}-{name}" for problem, name in CASES])
def test_against_the_reference_in_float64(problem: Problem, name: str) -> None:
    exact = results(problem, "reference", torch.float64)
    assert_near(results(problem, name, torch.float32), exact, 1e-5)
    if name != "reference" and problem.differentiable:
        assert_near(results(problem, name, torch.float64), exact, 1e-12)


DIFFERENTIABLE = [problem for problem in PROBLEMS if problem.differentiable]


@pytest.mark.parametrize("problem", DIFFERENTIABLE, ids=str)
def test_the_reference_in_half_precision(problem: Problem) -> None:
    for one, other in zip(
        results(problem, "reference", torch.bfloat16), results(problem, "reference", torch.float64), strict=True
    ):
        assert one.shape == other.shape
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= 0.1 * max(1.0, other.norm().item())


def test_every_operation_has_problems() -> None:
    assert {problem.operation for problem in PROBLEMS} | RANDOM == set(dispatch.operations())


def test_log_scales_are_constants_for_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_log_scales_are_constants("reference", monkeypatch)


def assert_log_scales_are_constants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also log_scales that a gate made, with every implementation of the scan alike."""
    monkeypatch.setenv(dispatch.VARIABLE, name)
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 1, 2, 9, 4).unbind(0)
    gate = torch.rand(1, 2, 9, requires_grad=True)
    start = torch.zeros(1, 2, requires_grad=True)
    y, last = causal_sums(q.requires_grad_(), k, v, gate.cumsum(-1), torch.zeros(1, 2, 4, 5), start)
    gradients = torch.autograd.grad(y.sum() + last.sum(), [q, gate, start], allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1:] == (None, None)
