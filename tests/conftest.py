"""What tests of several folders use."""

import gc
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.gpu.shortcuts import take_shortcuts
from tests.preloaded import preloaded, see_file

if os.environ.get("TRITON_INTERPRET") == "1":
    take_shortcuts()

gc.disable()  # until all tests are found: what is imported and found stays, and would be looked through again and again

LONG = (
    "test_interpreted.py", "test_torture.py", "test_distributed.py", "test_interruption.py", "test_comparison.py",
    "test_export.py", "test_gpu_tests.py",
)  # fmt: skip
"""Files with the longest single tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests are the first: at the end one process would wait for the other's last test."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # tracing a graph makes hundreds of thousands of objects that stay
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", see_file)
        yield


@pytest.fixture(scope="module")
def preloaded_programs() -> Iterator[None]:
    """Programs that the tests of a module start do not import torch anew."""
    with preloaded():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that is installed, driven by playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs the browser Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()
