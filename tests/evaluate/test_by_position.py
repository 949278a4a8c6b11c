"""Buckets of positions that double in size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from subquad.evaluate.by_position import PositionLoss, mean_losses, position_buckets


@given(st.integers(1, 70_000))
def test_every_position_is_in_the_bucket_of_its_size(length: int) -> None:
    buckets = position_buckets(length)
    assert [bucket.start for bucket in buckets] == [0, *(bucket.stop for bucket in buckets[:-1])]
    assert buckets[-1].stop == length
    for number, bucket in enumerate(buckets):
        assert bucket.start.bit_length() == (bucket.stop - 1).bit_length() == number


def test_the_first_buckets() -> None:
    shown = [(bucket.start, bucket.stop - 1) for bucket in position_buckets(13)]
    assert shown == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 12)]


def test_means_are_over_tokens() -> None:
    """A bucket without tokens has no mean: with a context window nothing is scored at the first positions."""
    found = mean_losses(np.array([[0.0, 0], [6.0, 3], [1.0, 4]]), position_buckets(4))
    assert found == [PositionLoss(1, 1, 2.0, 3), PositionLoss(2, 3, 0.25, 4)]
