"""The tests for GPUs (tests/gpu) on the emulated one: a selection in the suite, all of them at night."""

from pathlib import Path

import pytest

from tests.emulated_gpu.programs import needs_emulated_gpu, run_tests_on_emulated_gpu

pytestmark = needs_emulated_gpu

GPU_TESTS = Path(__file__).parents[1] / "gpu"
FILES = sorted(path.name for path in GPU_TESTS.glob("test_*.py"))


@pytest.mark.parametrize("file", ["test_mixers.py"])
def test_a_selection(file: str) -> None:
    run_tests_on_emulated_gpu(GPU_TESTS / file, "-m", "gpu and not nightly")


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES)
def test_everything(file: str) -> None:
    run_tests_on_emulated_gpu(GPU_TESTS / file, "-m", "gpu")
