"""Normaliser and largest entries of rows: compiled against torch, at odd sizes, with entries that cannot be."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.kernels.vocabulary import largest, log_sum_exp, normalised_largest

ROWS, SIZES, SEEDS = st.integers(1, 5), st.integers(1, 300), st.integers(0, 99)


def scores(rows: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A third of the entries cannot be; the others are large and small."""
    values = 20 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values[:, 1 : 1 + size // 3] = -math.inf
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(deadline=None, derandomize=True)  # the first example compiles
@given(rows=ROWS, size=SIZES, seed=SEEDS)
def test_log_sum_exp(rows: int, size: int, seed: int, dtype: torch.dtype) -> None:
    values = scores(rows, size, seed, dtype)
    expected = values.double().logsumexp(-1)
    relative = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(log_sum_exp(values).double(), expected, rtol=relative, atol=relative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, derandomize=True)  # the first example compiles
@given(rows=ROWS, size=SIZES, count=st.integers(1, 12), seed=SEEDS)
def test_largest(rows: int, size: int, count: int, seed: int, dtype: torch.dtype) -> None:
    values = scores(rows, size, seed, dtype)
    count = min(count, size)
    found, places = largest(values, count)
    assert torch.equal(found, values.topk(count, -1).values)
    assert torch.equal(values.gather(1, places), found)
    assert all(len(set(row)) == count for row in places.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(deadline=None, derandomize=True)  # the first example compiles
@given(rows=ROWS, size=st.integers(2, 300), count=st.integers(1, 12), seed=SEEDS)
def test_both_in_one_reading(rows: int, size: int, count: int, seed: int, dtype: torch.dtype) -> None:
    """The hidden entry counts for the normaliser, is never found, and is -inf afterwards."""
    values, count = scores(rows, size, seed, dtype), min(count, size - 1)
    hidden = seed % size
    expected = log_sum_exp(values)
    normaliser, found, places = normalised_largest(values, count, hidden)
    torch.testing.assert_close(normaliser, expected, rtol=2e-2 if dtype == torch.bfloat16 else 2e-6, atol=2e-6)
    assert torch.isneginf(values[:, hidden]).all()
    assert torch.equal(found, values.topk(count, -1).values)
    assert torch.equal(values.gather(1, places), found)
    assert all(len(set(row)) == count for row in places.tolist())


def test_nothing_possible_is_told() -> None:
    values = torch.full((2, 70), -math.inf)
    assert torch.isneginf(largest(values, 3)[0]).all()
    assert not torch.isfinite(log_sum_exp(values)).any()
    values[0, 5] = math.nan
    assert torch.isnan(log_sum_exp(values)[0])


def test_columns_of_a_larger_tensor() -> None:
    values = torch.randn(6, 200)[::2, 10:150]
    torch.testing.assert_close(log_sum_exp(values), values.logsumexp(-1))
    assert torch.equal(largest(values, 4)[0], values.topk(4, -1).values)


@pytest.mark.parametrize("size", [9, 70, 200])
@pytest.mark.parametrize("share", [1, 2])
def test_rows_that_are_no_numbers_stay_within_themselves(size: int, share: int) -> None:
    """A row of a diverged model has nothing to choose from: its places are its own, not those of what lies behind."""
    values = torch.full((2, size), -math.inf)
    values[0] = 1.0
    values[0, ::share] = math.nan
    for normaliser, _, places in (
        (log_sum_exp(values), *largest(values, 6)),
        normalised_largest(values.clone(), 6, hidden=1),
    ):
        assert normaliser[0].isnan()
        assert all(sorted(row) == sorted({*row} & {*range(size)}) for row in places.tolist())
