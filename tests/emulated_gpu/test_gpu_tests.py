"""The tests for GPUs (tests/gpu) on the emulated one: a selection in the suite, all of them at night."""

from pathlib import Path

import pytest

from tests.emulated_gpu.programs import needs_emulated_gpu, run_tests_on_emulated_gpu

pytestmark = needs_emulated_gpu

GPU_TESTS = Path(__file__).parents[1] / "gpu"
FILES = sorted(path.name for path in GPU_TESTS.glob("test_*.py"))
WITH_REFERENCE_KERNELS = ("test_commands.py", "test_training.py")
"""Triton's interpreter takes hours for what they compute."""


def test_mechanisms() -> None:
    run_tests_on_emulated_gpu(GPU_TESTS / "test_mixers.py", "-m", "gpu and not nightly")


def test_commands_and_trainings() -> None:
    names = ("test_commands.py", "test_decoding.py", "test_training.py", "test_presets.py")
    run_tests_on_emulated_gpu(
        *(GPU_TESTS / name for name in names), "-m", "gpu and not nightly", SUBQUAD_KERNELS="reference"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES)
def test_everything(file: str) -> None:
    kernels = "reference" if file in WITH_REFERENCE_KERNELS else "auto"
    run_tests_on_emulated_gpu(GPU_TESTS / file, "-m", "gpu", SUBQUAD_KERNELS=kernels)


@pytest.mark.nightly
def test_trainings_with_kernels_of_the_gpu() -> None:
    run_tests_on_emulated_gpu(GPU_TESTS / "test_training.py", "-m", "gpu", "-k", "losses_are_those_of_the_cpu")
