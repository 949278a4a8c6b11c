"""Every mechanism with every option set on a GPU, against the same mixer in float64 on the CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import Mixer
from subquad.testing import Case, every_case, reads_context, streams
from subquad.testing.cases import grid_options, has_parameters
from subquad.testing.inputs import padded_batch
from subquad.testing.streaming import read_stream

CASES = every_case()
TIME = 13
TOLERANCE = 1e-4
"""Of outputs and gradients in float32, relative to the largest."""


SMALL = {
    (case.name, case.causal): [one for one in CASES if (one.name, one.causal) == (case.name, case.causal)][:2][-1]
    for case in CASES
}
"""A case of each mechanism and form for the emulated GPU in the suite: the first ones have the defaults, whose kernels
take long in Triton's interpreter."""


def for_cases(cases: list[Case], at_night: bool = False) -> Any:
    """A test for each case; for the night, unless it is a small one."""

    def mark(case: Case) -> Any:
        return pytest.mark.nightly if at_night or case not in SMALL.values() else ()

    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=mark(case)) for case in cases])


def padding_of(case: Case, time: int) -> Tensor:
    """Rows (3, time) with right and with scattered padding, and one that is padded wholly."""
    return padded_batch(time, case.seed)[[2, 4, 6]]


def results(mixer: Mixer, x: Tensor, **inputs: Any) -> list[Tensor]:
    """The output, the auxiliary loss, and the gradients of x and of all weights, in float64 on the CPU."""
    x = x.clone().requires_grad_()
    out = mixer(x, **inputs)
    outputs = [out.y] if out.aux is None else [out.y, out.aux]
    loss = sum((y.double() * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.device)).sum() for y in outputs)
    weights = [weight for weight in mixer.parameters() if weight.requires_grad]
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, [x, *weights], allow_unused=True)
    return [one.detach().cpu().double() for one in (*outputs, *gradients) if one is not None]


def assert_agree(case: Case, mixer: Mixer, x: Tensor, **inputs: Any) -> None:
    """On the GPU in float32 what is right on the CPU in float64."""
    wide = {name: value.double() if name == "context" else value for name, value in inputs.items()}
    on_gpu = {name: value.to("cuda") if isinstance(value, Tensor) else value for name, value in inputs.items()}
    exact = results(copy.deepcopy(mixer).double(), x.double(), **wide)
    found = results(copy.deepcopy(mixer).to("cuda"), x.to("cuda"), **on_gpu)
    largest = max(float(one.abs().max()) for one in exact if one.numel())
    for number, (ours, right) in enumerate(zip(found, exact, strict=True)):
        assert ours.shape == right.shape
        error = (ours - right).abs().max().item()
        assert error <= TOLERANCE * max(1.0, largest), (str(case), number, error, largest)  # false for NaN


@for_cases(CASES)
def test_against_float64_on_the_cpu(case: Case) -> None:
    padding = padding_of(case, TIME)
    assert_agree(case, case.build(), case.tokens(len(padding), TIME), padding=padding)


@for_cases(CASES, at_night=True)
def test_without_padding(case: Case) -> None:
    for time in (1, 2 * TIME):
        assert_agree(case, case.build(), case.tokens(2, time))


@for_cases([case for case in CASES if grid_options(case) is not None])
def test_grids(case: Case) -> None:
    padding = padding_of(case, 12)
    x = case.tokens(len(padding), 12)
    mixer = case.build(**(grid_options(case) or {}))
    assert_agree(case, mixer, x, padding=padding, grid=(4, 3))


@for_cases([case for case in CASES if reads_context(case)])
def test_contexts(case: Case) -> None:
    padding = padding_of(case, 9)
    x, context = case.tokens(len(padding), 5), case.tokens(len(padding), 9, seed=1)
    assert_agree(case, case.build(), x, context=context, context_padding=padding)


@for_cases([case for case in CASES if streams(case)])
def test_streams(case: Case) -> None:
    """Chunks of 1, 4 and 8 tokens give what one pass gives, and states are reordered on the GPU."""
    mixer = case.build().to("cuda")
    x = case.tokens(3, TIME).to("cuda")
    with torch.no_grad():
        whole = mixer(x).y
        first, state = read_stream(mixer, x[:, :5], [1, 4], state=mixer.init_state(3, device=x.device))
        order = torch.tensor([2, 0, 0, 1], device=x.device)
        rest, _ = read_stream(mixer, x[order, 5:], [TIME - 5], state=state.reorder(order))
    for ours, right in ((first, whole[:, :5]), (rest, whole[order, 5:])):
        assert (ours - right).abs().max() <= TOLERANCE * whole.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@for_cases([case for case in CASES if has_parameters(case)], at_night=True)
def test_training_under_autocast(case: Case, dtype: torch.dtype) -> None:
    """With what training draws, outputs and gradients are finite."""
    mixer = case.build().train().to("cuda")
    padding = padding_of(case, TIME)
    x = case.tokens(len(padding), TIME).to("cuda").requires_grad_()
    with torch.autocast("cuda", dtype):
        out = mixer(x, padding=padding.to("cuda"))
    loss = out.y.float().square().sum() + (0 if out.aux is None else out.aux.sum())
    loss.backward()
    assert out.y.isfinite().all()
    for gradient in (x.grad, *(weight.grad for weight in mixer.parameters() if weight.requires_grad)):
        assert gradient is None or gradient.isfinite().all()


@for_cases(CASES, at_night=True)
def test_equal_inputs_give_equal_bits(case: Case) -> None:
    mixer = case.build().to("cuda")
    padding = padding_of(case, TIME).to("cuda")
    x = case.tokens(len(padding), TIME).to("cuda")
    first, second = (results(mixer, x, padding=padding) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
