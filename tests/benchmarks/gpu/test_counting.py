"""What is counted on fake GPU tensors, and what follows from it: the scale plan and the pages.

Counting leaves a CUDA guard in the process (`tools/cuda_guard`), so the `check_` functions of the files `counted_*.py`
run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import cuda_guard

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(cuda_guard.why_unavailable() is not None, reason="needs a C++ compiler"),
]
FOLDER = Path(__file__).parent


def run_checks(marks: str) -> None:
    found = ["-o", "python_files=counted_*.py", "-o", "python_functions=check_*", "-m", marks]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *found, str(FOLDER)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    result = subprocess.run(command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_counts() -> None:
    run_checks("not nightly")


@pytest.mark.nightly
def test_pages_have_what_is_counted() -> None:
    run_checks("nightly")
