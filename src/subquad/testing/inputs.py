"""Shapes, paddings and chunkings that the contract is tried on, and the comparison of results.

Every case meets the same named shapes; what is random about them comes from the seed of the case.
"""

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

Size = TypeVar("Size")

LENGTHS = (1, 2, 5, 13, 33)
"""Lengths of sequences: below, at and above the windows, chunks and kernels of usual examples, most of them odd."""
GRIDS = ((1, 1), (1, 5), (4, 4), (7, 3), (5, 9))


def paddings(time: int, seed: int) -> dict[str, Tensor]:
    """Masks (time,) bool, True = ignore, by what they are called. Each leaves at least one token."""
    rng = random.Random(seed)
    first = rng.randrange(time)
    last = rng.randrange(first, time)
    place = torch.arange(time)
    scattered = torch.rand(time, generator=torch.Generator().manual_seed(seed)) < 0.5
    scattered[first] = False
    return {
        "no padding": place < 0,
        "left padding": place < first,
        "right padding": place > last,
        "interior padding": (place > 0) & (place < time - 1) & (place >= first) & (place <= last),
        "scattered padding": scattered,
        "padding around one token": place != first,
    }


def padded_batch(time: int, seed: int) -> Tensor:
    """Every kind of padding side by side, and a row that is padded wholly: (batch, time) bool."""
    rows = list(paddings(time, seed).values())
    return torch.stack([*rows, torch.ones(time, dtype=torch.bool)])


def chunkings(time: int, seed: int) -> dict[str, list[int]]:
    """Sizes of the chunks in which a stream of `time` tokens is read, by what the division is called."""
    rng = random.Random(seed)
    uneven: list[int] = []
    while (left := time - sum(uneven)) > 0:
        uneven.append(rng.randint(1, left))
    return {"token by token": [1] * time, "at once": [time], f"in chunks of {uneven}": uneven}


def with_and_without_gradients(sizes: Iterable[Size]) -> list[tuple[Size, AbstractContextManager[Any]]]:
    """Sizes, each with the context in which to try it: mechanisms may go other ways when nothing is differentiated."""
    return [(size, torch.enable_grad() if number % 2 else torch.no_grad()) for number, size in enumerate(sizes)]


# ---------------------------------------------------------------------- comparing


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value of b where that is above 1."""
    if a.numel() == 0:
        return 0.0
    return ((a - b).abs().max() / max(1.0, b.abs().max().item())).item()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Equal within `tolerance`, relative to the largest value where that is above 1."""
    return a.shape == b.shape and difference(a, b) <= tolerance


def assert_close(ours: Tensor, expected: Tensor, where: str, tolerance: float = 1e-5) -> None:
    """Fails with a sentence that says where the two differ, and by how much."""
    assert ours.shape == expected.shape, f"{where}: the shape is {tuple(ours.shape)}, not {tuple(expected.shape)}"
    if close(ours, expected, tolerance):  # not finite is not close
        return
    apart = (ours - expected).abs().nan_to_num(nan=torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    message = f"{where}: {ours[place].item():.6g} at {place} should be {expected[place].item():.6g}"
    raise AssertionError(
        f"{message}; differences up to {tolerance:g} are rounding, this is {difference(ours, expected):.2g}"
    )


def assert_near(ours: Tensor, exact: Tensor, where: str, tolerance: float) -> None:
    """For lower precision: the norm of the difference is at most `tolerance` of the norm of what is exact."""
    assert ours.shape == exact.shape, f"{where}: the shape is {tuple(ours.shape)}, not {tuple(exact.shape)}"
    apart = ((ours.float() - exact.float()).norm() / exact.float().norm()).item()
    assert apart <= tolerance, f"{where}: is {apart:.2%} away from what is exact, more than {tolerance:.0%}"
