"""Every operation on a GPU, with its GPU kernel where it has one, against the reference in float64 on the CPU."""

import importlib.util

import pytest
import torch
from torch import Tensor

from subquad.kernels import dispatch
from tests.kernels.problems import Problem, every_problem

PROBLEMS = every_problem()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def results(problem: Problem, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and the gradients of all inputs, given gradients of all outputs; on the CPU."""
    inputs = [t.to(device, dtype).requires_grad_(problem.differentiable) for t in problem.inputs]
    found = problem.run(*inputs)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    gradients: tuple[Tensor, ...] = ()
    if problem.differentiable:
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
        gradients = torch.autograd.grad(outputs, inputs, upstream)
    return [one.detach().cpu() for one in (*outputs, *gradients)]


def has_gpu_kernel(problem: Problem) -> bool:
    return importlib.util.find_spec(f"subquad.kernels.{problem.operation}.gpu") is not None


def assert_near(problem: Problem, dtype: torch.dtype, exact: list[Tensor]) -> None:
    for number, (ours, right) in enumerate(zip(results(problem, "cuda", dtype), exact, strict=True)):
        assert ours.shape == right.shape
        error = (ours.double() - right.double()).abs().max().item()
        # false for NaN
        assert error <= TOLERANCES[dtype] * max(1.0, right.abs().max().item()), (number, dtype, error)


@pytest.mark.nightly  # the suite holds the kernels against float64 in Triton's interpreter: tests/kernels/gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_the_reference_in_float64(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    if not problem.differentiable and problem.operation == "linear":
        pytest.skip("weights of 8 bits round differently in every precision")
    with monkeypatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "reference")
        exact = results(problem, "cpu", torch.float64)
    assert_near(problem, torch.float32, exact)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", [one for one in PROBLEMS if has_gpu_kernel(one)], ids=str)
def test_half_precision(problem: Problem, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs that were rounded to that precision before."""
    rounded = problem._replace(inputs=[t.to(dtype).double() for t in problem.inputs])
    with monkeypatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "reference")
        exact = results(rounded, "cpu", torch.float64)
    assert_near(rounded, dtype, exact)
