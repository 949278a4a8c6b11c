"""Starts programs on the emulated GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import cuda_guard

ROOT = Path(__file__).parents[2]


def _why_unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the emulated GPU needs triton"
    return cuda_guard.why_unavailable()


needs_emulated_gpu = pytest.mark.skipif(_why_unavailable() is not None, reason=str(_why_unavailable()))


def run_on_emulated_gpu(*words: str | Path, **environment: str) -> str:
    """Runs `python -m WORDS` there and returns what it printed; fails with all of that if it fails."""
    command = [sys.executable, "-m", "tests.emulated_gpu", *map(str, words)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    result = subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_tests_on_emulated_gpu(*words: str | Path, **environment: str) -> None:
    """Runs pytest there; at least one test has to run."""
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-o", "python_functions=test_* check_*"]
    printed = run_on_emulated_gpu("pytest", *options, *words, **environment)
    assert " passed" in printed, printed
