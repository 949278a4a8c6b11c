"""How linear attention cuts its work: parts for threads, and tiles of time that stay in the cache."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE_ELEMENTS = 2**18
"""Features of a tile: 1 MiB in float32. Larger tiles leave the cache, smaller ones cost calls."""


class Part(NamedTuple):
    """What one thread does at once: all heads of some sequences, or some heads of one."""

    rows: slice
    heads: slice

    def flat(self, x: Tensor) -> Tensor:
        """The part of x (batch, time, ..., heads, d), a view."""
        return x[self.rows, ..., self.heads, :]

    def of(self, x: Tensor) -> Tensor:
        """The part of x (batch, heads, ...), a view."""
        return x[self.rows, self.heads]


def parts_of(qkv: Tensor) -> list[Part]:
    """About two for each thread, so that one that is held up can be helped."""
    batch, heads, threads = qkv.shape[0], qkv.shape[3], torch.get_num_threads()
    everything = slice(0, heads)
    if threads == 1:
        return [Part(slice(0, batch), everything)]
    if batch >= threads:
        rows = -(-batch // (2 * threads))
        return [Part(slice(row, row + rows), everything) for row in range(0, batch, rows)]
    some = -(-heads * batch // (2 * threads))
    return [
        Part(slice(row, row + 1), slice(head, head + some)) for row in range(batch) for head in range(0, heads, some)
    ]


class Tile(NamedTuple):
    """Some positions of one sequence, or all positions of some sequences."""

    rows: slice
    times: slice

    def packed(self, x: Tensor) -> Tensor:
        """The tile of x (batch, time, heads, d): (rows * heads, times, d), contiguous.

        A copy: products of rows that lie a whole projection apart are slower.
        """
        return self.spread(x).contiguous().flatten(0, 1)

    def spread(self, x: Tensor) -> Tensor:
        """The tile of x (batch, time, heads, d): (rows, heads, times, d), a view to write to."""
        return x[self.rows, self.times].transpose(1, 2)

    def of(self, x: Tensor) -> Tensor:
        """The tile of x (batch, heads, time, ...): (rows * heads, times, ...), a view when it is part of one row."""
        return x[self.rows, :, self.times].flatten(0, 1)

    def sums(self, x: Tensor) -> Tensor:
        """What belongs to the tile's rows in x (batch, heads, ...): (rows * heads, ...), a view."""
        return x[self.rows].flatten(0, 1)


def tiles_of(x: Tensor, features: int) -> Iterator[Tile]:
    """Tiles of x (batch, time, ..., heads, d)."""
    batch, time, heads, width = *x.shape[:2], *x.shape[-2:]
    most = max(1, TILE_ELEMENTS // (heads * max(width, features)))
    if most >= time:
        for row in range(0, batch, most // time):
            yield Tile(slice(row, row + most // time), slice(0, time))
        return
    for row in range(batch):
        for first in range(0, time, most):
            yield Tile(slice(row, row + 1), slice(first, first + most))


def per_row(matrix: Tensor, rows: int) -> Tensor:
    """(heads, ...) once for each row of a tile: (rows * heads, ...)."""
    return matrix if rows == 1 else matrix.repeat(rows, 1, 1)
