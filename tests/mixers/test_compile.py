"""torch.compile without graph breaks, few recompilations, and torch.export, for every mechanism."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from subquad.testing import Case, close, every_case, first_case, tokens

LENGTHS = (41, 64, 50, 96, 57, 80, 73, 48)  # above every window, kernel and landmark count of the examples


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def marks_of(always: bool) -> list[pytest.MarkDecorator]:
    return [] if always else [pytest.mark.nightly]


def first_or_nightly(case: Case) -> object:
    """The first example of each mechanism and form always, the others (tens of seconds each) at night."""
    return pytest.param(case, marks=marks_of(case.is_first))


def backends() -> list[object]:
    """The backward pass is traced for a form of three mechanisms, and the forward pass for every form; all at night."""
    traced = [first_case(name) for name in ("lightconv", "eva", "lara")]
    others = [case for case in every_case() if case.is_first and case not in traced]
    at_night = [case for case in every_case() if case not in traced]
    return [
        *(pytest.param(case, "aot_eager") for case in traced),
        *(pytest.param(case, "eager") for case in others),
        *(pytest.param(case, "aot_eager", marks=pytest.mark.nightly) for case in at_night),
    ]


@pytest.mark.parametrize(("case", "backend"), backends(), ids=str)
def test_one_graph_serves_many_lengths(case: Case, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    mixer = case.build()
    compiled = torch.compile(mixer, backend=counter, fullgraph=True)
    for time in LENGTHS:
        x, y = (tokens(2, time, time).requires_grad_() for _ in range(2))
        ours, eager = compiled(x).y, mixer(y).y
        assert close(ours, eager)
        ours.square().sum().backward()
        eager.square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert close(x.grad, y.grad, 5e-5)
    assert counter.frame_count <= 3, f"{counter.frame_count - 1} recompilations"


@pytest.mark.parametrize("name", ["lightconv", pytest.param("eva", marks=pytest.mark.nightly)])
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_default_backend_agrees(name: str) -> None:
    mixer, x = first_case(name, causal=True).build(), tokens(2, 41, 0)
    compiled = torch.compile(mixer, fullgraph=True)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # it would compile a program for each it knows first
        assert close(compiled(x).y, mixer(x).y)


@pytest.mark.parametrize("case", [first_or_nightly(case) for case in every_case()], ids=str)
def test_exports(case: Case) -> None:
    mixer, x = case.build(), tokens(2, 41, 0)
    with torch.no_grad():
        program = torch.export.export(mixer, (x,))
        other = tokens(2, 41, 1)
        assert close(program.module()(other).y, mixer(other).y)
