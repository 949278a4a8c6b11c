"""Outputs and all gradients of every operation that has Triton kernels, in the interpreter, as mixers call them."""

from pathlib import Path

from tests.kernels.gpu.interpreter import needs_triton, run_checks
from tests.kernels.test_gradients import check_gradients as check_gradients  # run_checks finds it here

pytestmark = needs_triton


def test_against_the_reference_in_float64(tmp_path: Path) -> None:
    run_checks(__file__, tmp_path)
