"""Tests that need a process of their own, because of what they leave in it or what it has to be told when it starts.

They are functions named `check_*`, which pytest does not collect by itself; a test runs them with `run_checks`.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_checks(*words: str | Path, marks: str = "not nightly", **variables: str) -> None:
    """Runs the `check_` functions that pytest finds with `words`, its arguments; fails with what they printed.

    variables: of the environment, in which those of this pytest and of Triton are not.
    """
    options = ["-o", "python_functions=check_*", "-m", marks, "-p", "no:xdist", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-m", "pytest", *options, *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, env=kept | variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
