"""Runs Triton kernels on CPU tensors, in Triton's interpreter, and holds them against float64.

Triton decides when it is imported whether it interprets, and other tests need it not to. So a `test_<operation>.py` of
this folder has functions named `check_*`, which pytest does not collect, and a test that runs them in a process of
their own:

    pytestmark = needs_triton


    def test_against_float64(tmp_path):
        run_checks(__file__, tmp_path)


    @pytest.mark.nightly
    def test_more_sizes_against_float64(tmp_path):
        run_checks(__file__, tmp_path, marks="nightly")


    def check_forward(poisoned): ...
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[3]
LOW_PRECISIONS = (torch.bfloat16, torch.float16)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_checks(file: str, folder: Path, marks: str = "not nightly") -> None:
    """Runs the `check_` functions of a file in the interpreter; fails with what they printed. folder: for its cache."""
    options = ["-o", "python_functions=check_*", "-m", marks, "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", *options, file]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest value expected."""
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), (error / expected.abs().max()).item()  # false for NaN


def tolerance_of(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 2e-2)
