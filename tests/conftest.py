"""What tests of several folders use."""

from collections.abc import Iterator

import pytest

from tests.preloaded import preloaded

LONG = (
    "test_interpreted.py", "test_torture.py", "test_distributed.py", "test_interruption.py", "test_comparison.py",
    "test_export.py", "test_gpu_tests.py",
)  # fmt: skip
"""Files with the longest single tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests are the first: at the end one process would wait for the other's last test."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="module")
def preloaded_programs() -> Iterator[None]:
    """Programs that the tests of a module start do not import torch anew."""
    with preloaded():
        yield
