"""How CPU kernels cut their work: parts for threads, and tiles of a part, whose matrices stay in the cache."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE_ELEMENTS = 2**18
"""Entries of a tile's largest matrix: 1 MiB in float32. Larger tiles leave the cache, smaller ones cost calls."""


def cut(rows: int, columns: int, elements: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Cuts a table of rows x columns, each cell of which holds `elements` entries, into pieces of at most `most`.

    A piece is several whole rows, where these fit, and else some columns of one row; it has at least one cell.
    """
    cells = max(1, most // elements)
    if cells >= columns:
        height = cells // columns
        for row in range(0, rows, height):
            yield slice(row, min(row + height, rows)), slice(0, columns)
        return
    for row in range(rows):
        for column in range(0, columns, cells):
            yield slice(row, row + 1), slice(column, min(column + cells, columns))


class Part(NamedTuple):
    """What one thread does at once: all heads of some sequences, or some heads of one."""

    rows: slice
    heads: slice

    def of_tokens(self, x: Tensor) -> Tensor:
        """The part of x (batch, time, ..., heads, d), a view."""
        return x[self.rows, ..., self.heads, :]

    def of_heads(self, x: Tensor) -> Tensor:
        """The part of x (batch, heads, ...), a view."""
        return x[self.rows, self.heads]


def parts_by_size(batch: int, heads: int, elements: int) -> list[Part]:
    """Parts of one tile each, where `elements` are those of one head of a sequence; a larger head is a part alone."""
    return [Part(*piece) for piece in cut(batch, heads, elements, TILE_ELEMENTS)]


def parts_by_thread(batch: int, heads: int) -> list[Part]:
    """About two for each thread, so that one that is held up can be helped."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [Part(slice(0, batch), slice(0, heads))]
    most = -(-batch // (2 * threads)) * heads if batch >= threads else -(-batch * heads // (2 * threads))
    return [Part(*piece) for piece in cut(batch, heads, 1, most)]


class Tile(NamedTuple):
    """Some positions of one sequence of a part, or all positions of some; products treat its n heads as one batch."""

    rows: slice
    time: slice

    def view(self, x: Tensor) -> Tensor:
        """The tile of x (batch, time, heads, d): (rows, heads, t, d), a view."""
        return x[self.rows, self.time].transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """The tile of x (batch, time, heads, d): (n, t, d), contiguous.

        A copy: products of rows that lie a whole projection apart take longer than copy and product together.
        """
        return self.view(x).contiguous().flatten(0, 1)

    def unpack(self, values: Tensor, x: Tensor) -> None:
        """Writes values (n, t, d) to where `pack` reads in x."""
        target = self.view(x)
        target.copy_(values.view(target.shape))

    def of_heads(self, x: Tensor) -> Tensor:
        """What belongs to the tile's rows in x (batch, heads, ...): (n, ...), a view."""
        return x[self.rows].flatten(0, 1)

    def of_positions(self, x: Tensor) -> Tensor:
        """The tile of x (batch, heads, time, ...): (n, t, ...), a view when it is part of one row."""
        return x[self.rows, :, self.time].flatten(0, 1)

    def fill_hidden(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        """Sets x (n, t, ...), in place, to a value where the mask (batch, time) is False."""
        hidden = mask[self.rows, None, self.time].logical_not()
        by_row = x.unflatten(0, (hidden.shape[0], -1))
        by_row.masked_fill_(hidden.view(*hidden.shape, *(1,) * (by_row.dim() - 3)), value)
        return x


def tiles_of(x: Tensor, elements: int) -> list[Tile]:
    """Tiles of x (batch, time, ..., heads, d), where each position of a head has `elements` entries."""
    return [Tile(*piece) for piece in cut(x.shape[0], x.shape[1], x.shape[-2] * elements, TILE_ELEMENTS)]
