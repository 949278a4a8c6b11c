"""Bytes and FLOPs that `benchmarks/gpu/traffic/` claims are those that Triton's interpreter sees.

Triton decides on import whether it interprets, and other tests need it not to: the `check_` functions of the files
`traffic_*.py` beside this one run in a process of their own. An operation's checks are one such file; `traffic_conv.py`
is the model.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

FOLDER = Path(__file__).parent


def test_traffic_is_that_of_the_interpreter(tmp_path: Path) -> None:
    found = ["-o", "python_files=traffic_*.py", "-o", "python_functions=check_*"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *found, str(FOLDER)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment |= {"TRITON_INTERPRET": "1", "SUBQUAD_KERNELS": "gpu", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
