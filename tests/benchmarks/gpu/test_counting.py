"""What is counted on fake GPU tensors, and what follows from it: the scale plan and the pages.

Counting leaves a CUDA guard in the process (`tools/cuda_guard`), so the `check_` functions of the files `counted_*.py`
run in a process of their own.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.checks import run_checks
from tools import cuda_guard

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(cuda_guard.why_unavailable() is not None, reason="needs a C++ compiler"),
]
WORDS = ("-o", "python_files=counted_*.py", Path(__file__).parent)


def test_counts() -> None:
    run_checks(*WORDS)


@pytest.mark.nightly
def test_pages_have_what_is_counted() -> None:
    run_checks(*WORDS, marks="nightly")
