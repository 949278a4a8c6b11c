"""Bytes and FLOPs that `benchmarks/gpu/traffic/` claims are those that Triton's interpreter sees.

Triton decides on import whether it interprets, and other tests need it not to: the `check_` functions of the files
`traffic_*.py` beside this one run in a process of their own. An operation's checks are one such file; `traffic_conv.py`
is the model.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.checks import run_checks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


FOLDER = Path(__file__).parent
QUICK = ("window_attention", "primal_scores", "cross_entropy")


def test_traffic_is_that_of_the_interpreter(tmp_path: Path) -> None:
    run_interpreted(tmp_path, *(FOLDER / f"traffic_{operation}.py" for operation in QUICK))


@pytest.mark.nightly
def test_traffic_of_every_operation(tmp_path: Path) -> None:
    run_interpreted(tmp_path, FOLDER)


def run_interpreted(cache: Path, *paths: Path) -> None:
    variables = {"TRITON_INTERPRET": "1", "SUBQUAD_KERNELS": "gpu", "TRITON_CACHE_DIR": str(cache)}
    run_checks("-o", "python_files=traffic_*.py", *paths, **variables)
