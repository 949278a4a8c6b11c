"""What tests of Triton kernels share; `test_interpreted.py` runs the `check_` functions of this folder.

Those hold kernels against float64 on CPU tensors, in Triton's interpreter.
"""

import importlib.util

import pytest
import torch
from torch import Tensor

LOW_PRECISIONS = (torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly))
"""To parametrise tests with. Kernels are the same for both; the interpreter takes its time for each."""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest value expected."""
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), (error / expected.abs().max()).item()  # false for NaN


def tolerance_of(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 2e-2)
