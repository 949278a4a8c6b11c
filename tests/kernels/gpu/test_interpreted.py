"""The Triton kernels of every operation in Triton's interpreter: what this folder's `check_` functions find.

The suite tries a problem of each operation and lower precision, the nightly tests everything.

Triton decides when it is imported whether it interprets, and other tests need it not to: the functions run in a process
of their own, which is one for all of them in the suite.
"""

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

from tests.checks import run_checks
from tests.kernels.gpu.interpreter import needs_triton
from tests.kernels.problems import Problem, every_problem
from tests.kernels.test_gradients import assert_near, results

pytestmark = needs_triton

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
INTERPRETED = {"TRITON_INTERPRET": "1"}


def test_checks(tmp_path: Path) -> None:
    run_checks(FOLDER, "-k", "reference or precision or overflow", TRITON_CACHE_DIR=str(tmp_path), **INTERPRETED)


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES)
def test_more_checks(file: str, tmp_path: Path) -> None:
    run_checks(FOLDER / file, marks="", TRITON_CACHE_DIR=str(tmp_path), **INTERPRETED)


def check_integers_that_overflow_are_errors() -> None:
    double = importlib.import_module("tests.kernels.gpu.overflowing").double
    y = torch.empty(1, dtype=torch.int32)
    double[(1,)](torch.tensor([-(2**30)], dtype=torch.int32), y)
    assert y.item() == -(2**31)
    for number in (2**30, -(2**30) - 1):
        with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
            double[(1,)](torch.tensor([number], dtype=torch.int32), y)


# ---------------------------------------------------------------------- outputs and gradients, as mixers call them


def has_gpu_kernels(problem: Problem) -> bool:
    return importlib.util.find_spec(f"subquad.kernels.{problem.operation}.gpu") is not None


PROBLEMS = list(filter(has_gpu_kernels, every_problem()))
SMALL = {problem.operation: problem for problem in reversed(PROBLEMS)}
"""The first of each operation; the interpreter takes a minute for all."""


def marks_of(problem: Problem) -> tuple[pytest.MarkDecorator, ...]:
    return () if problem in SMALL.values() else (pytest.mark.nightly,)


@pytest.mark.parametrize("problem", [pytest.param(one, id=str(one), marks=marks_of(one)) for one in PROBLEMS])
def check_against_the_reference_in_float64(problem: Problem) -> None:
    exact = results(problem, "reference", torch.float64)
    assert_near(results(problem, "gpu", torch.float32), exact, 1e-5)
