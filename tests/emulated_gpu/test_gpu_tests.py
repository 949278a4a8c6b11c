"""Tests on the emulated GPU: a selection in the suite, all of them at night.

They are the tests for GPUs (tests/gpu) and the `check_` functions of other tests. Those of the suite share a process,
since starting one takes longer than most of them.
"""

from pathlib import Path

import pytest

from tests.emulated_gpu.programs import needs_emulated_gpu, run_tests_on_emulated_gpu

pytestmark = needs_emulated_gpu

TESTS = Path(__file__).parents[1]
GPU_TESTS = TESTS / "gpu"
FILES = sorted(path.name for path in GPU_TESTS.glob("test_*.py"))
TESTS = GPU_TESTS.parent
CHECKS = (
    TESTS / "emulated_gpu/test_device.py",
    TESTS / "emulated_gpu/test_budgets.py",
    TESTS / "train/test_waiting.py",
)
WITH_REFERENCE_KERNELS = ("test_commands.py", "test_training.py")
"""Triton's interpreter takes hours for what they compute."""


def test_mechanisms_and_checks() -> None:
    run_tests_on_emulated_gpu(*CHECKS, GPU_TESTS / "test_mixers.py", "-m", "not nightly", "-k", "check_ or test_mixers")


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
