"""Fixtures of the tests of Triton kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns is full of NaN, so that what a kernel leaves out shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled anew, and nothing is left in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
