"""Random numbers that depend on seeds alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.stable_rng import StableRng


@given(st.integers(1, 60), st.data())
def test_a_choice_is_the_beginning_of_a_permutation(count: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, count))
    chosen = StableRng(5, 1).choice(count, size)
    assert chosen.tolist() == StableRng(5, 1).permutation(count)[:size].tolist()


def test_numbers_are_spread_evenly() -> None:
    drawn = StableRng(1).uniform(20_000)
    assert 0 <= drawn.min() < drawn.max() < 1
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.01)
    counts = np.bincount(StableRng(2).integers(7, 21_000))
    assert len(counts) == 7
    assert counts.min() > 2_800
    assert counts.max() < 3_200


def test_seeds_matter() -> None:
    assert StableRng(1, 2).integers(1000, 5).tolist() != StableRng(2, 1).integers(1000, 5).tolist()
