"""Every test of this folder runs on a GPU: `make test-gpu`. Without one they are skipped.

`tests/emulated_gpu` runs them on its device as well: those that are not marked nightly in the suite, all at night.
"""

from pathlib import Path

import pytest
import torch

from tests.emulated_gpu.cuda import is_emulated

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def emulated() -> bool:
    """Whether the GPU is the emulated one, which neither compiles nor has several processes."""
    return is_emulated()
