"""What tests of several folders use."""

from collections.abc import Iterator

import pytest

from tests.preloaded import preloaded


@pytest.fixture(scope="module")
def preloaded_programs() -> Iterator[None]:
    """Programs that the tests of a module start do not import torch anew."""
    with preloaded():
        yield
