"""CPU kernels neither read nor write beyond their tensors, whatever the numbers in them are."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from subquad.kernels.cross_entropy import linear_cross_entropy
from subquad.kernels.linear import few_rows_linear, few_rows_map, int8_linear, int8_map, to_int8
from subquad.kernels.vocabulary import largest, normalised_largest
from tests.kernels.guarded import OPERATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="pages are forbidden by mprotect")
def test_kernels_stay_within_their_memory() -> None:
    command = [sys.executable, "-m", "tests.kernels.guarded"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, (result.returncode, result.stdout[-300:], result.stderr[-2000:])
    done = result.stdout.splitlines()
    assert done[-1] == "all stay within their memory"
    assert {line.partition("-")[0] for line in done[:-1]} == set(OPERATIONS)


@pytest.mark.parametrize("word", [-1, 11, 2**40])
def test_targets_that_are_no_words_are_refused(word: int) -> None:
    """The kernel writes the gradient of a target where it points to."""
    target = torch.tensor([3, word, 1])
    weight = torch.randn(11, 6, requires_grad=True)
    with pytest.raises(IndexError, match=f"word {word} is a target, but there are 11 words"):
        linear_cross_entropy(torch.randn(3, 6), weight, None, target, pad=1)


@pytest.mark.parametrize("build", [few_rows_map, int8_map])
def test_inputs_of_another_width_are_refused(build) -> None:
    """Twice as many channels are no more rows: those would be written behind the result."""
    weight, x = torch.randn(5, 8), torch.randn(3, 16)
    with pytest.raises(AssertionError, match="16 channels of 8"):
        build(weight, None)(x)
    with pytest.raises(AssertionError, match="16 channels of 8"):
        few_rows_linear(x, weight)


@pytest.mark.parametrize("width", [3, 64, 70])
def test_int8_weights_do_not_hide_what_is_no_number(width: int) -> None:
    """A row is rounded to integers, none of which stands for NaN or for an infinite number."""
    x = torch.randn(4, width)
    x[0, 1], x[1, 2], x[2, 0] = torch.nan, torch.inf, -torch.inf
    found = int8_linear(x, *to_int8(torch.randn(5, width)))
    assert not found[:3].isfinite().any()
    assert found[3].isfinite().all()


@pytest.mark.parametrize("count", [0, 10])
def test_no_more_entries_than_there_are(count: int) -> None:
    values = torch.randn(2, 9)
    with pytest.raises(AssertionError, match=f"{count} of 9 entries"):
        largest(values, count)
    with pytest.raises(AssertionError, match=f"{count} of 9 entries"):
        normalised_largest(values, count, 3)
