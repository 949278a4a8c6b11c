"""Chunks of EVA: which positions each chunk summarises, also when every row of a batch has its own chunk size."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.mixers.layout import Layout
from subquad.mixers.windows import cell_mask, partition, windows_in


class Chunks(NamedTuple):
    """Tokens by chunk; vectors at cells that are not tokens are zero.

    q, k, v: (batch, heads, chunks, cells, d). tokens: (batch or 1, 1, chunks, cells) bool.
    sizes: (batch or 1, 1, chunks, 1), what a chunk's mean divides by. exists: (batch or 1, chunks) bool, or None when
    every chunk exists in every row. length: tokens per chunk, an int, or (batch, 1) when each row has its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tokens: Tensor
    sizes: Tensor
    exists: Tensor | None
    length: int | Tensor


def cut(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    window: int,
    extension: int,
    chunk_size: int | None,
    landmarks: int | None,
) -> Chunks:
    """Cuts q, k, v (batch, heads, N, d) into chunks of `chunk_size` tokens per axis, or into about `landmarks` chunks.

    Chunks tile the space that whole windows cover. Given landmarks M they are max(1, floor(P / M)) long, P being the
    covered length of the row itself. Chunks overlap by the windows' extension on each side; a remainder shorter than a
    chunk is dropped when they do, and makes a short last chunk when they do not.
    """
    if layout.grid is not None:
        return _cut_grid(qkv, layout, layout.grid, window, extension, chunk_size, landmarks)
    if chunk_size is None and layout.valid is not None:
        assert landmarks is not None
        return _cut_rows(qkv, layout.valid, window, extension, landmarks)
    time = qkv[0].shape[2]
    covered = -(-time // window) * window
    size = chunk_size or max(1, covered // (landmarks or 1))
    count = max(1, covered // size) if extension else -(-covered // size)
    mask = cell_mask(layout.valid, (time,), qkv[0].device)
    if layout.valid is not None:
        qkv = tuple(part.masked_fill(~mask, 0) for part in qkv)  # type: ignore[assignment]
    q, k, v, tokens = (partition(part, size, (extension, extension), (count,)) for part in (*qkv, mask))
    index = torch.arange(count, device=q.device)
    if layout.valid is None:
        row_covered, exists = torch.full((1, 1), covered, device=q.device), None
    else:
        row_covered = -(-layout.valid.sum(1, keepdim=True) // window) * window
        exists = index * size < row_covered
    sizes = (row_covered - index * size).clamp(1, size) + 2 * extension
    return Chunks(q, k, v, tokens.squeeze(-1), sizes[:, None, :, None], exists, size)


def _cut_rows(qkv: tuple[Tensor, Tensor, Tensor], valid: Tensor, window: int, extension: int, landmarks: int) -> Chunks:
    """Every row has its own chunk size: positions are looked up instead of sliced."""
    batch, heads, time, width = qkv[0].shape
    covered = -(-time // window) * window
    longest = max(1, covered // landmarks)
    most = max(1, min(covered, 2 * landmarks - 1))  # floor(P / M) = r gives at most ceil((r M + M - 1) / r) chunks
    lengths = valid.sum(1)
    row_covered = -(-lengths // window) * window
    size = (row_covered // landmarks).clamp(min=1)[:, None]
    index = torch.arange(most, device=valid.device)
    count = row_covered[:, None] // size if extension else -(-row_covered[:, None] // size)
    exists = index < count
    cell = torch.arange(longest + 2 * extension, device=valid.device)
    position = (index * size - extension)[..., None] + cell
    tokens = (cell < size[..., None] + 2 * extension) & (position >= 0) & (position < lengths[:, None, None])
    tokens = tokens & exists[..., None]
    lookup = position.clamp(0, time - 1).flatten(1)[:, None, :, None].expand(batch, heads, -1, width)
    shape = (most, cell.shape[0])
    q, k, v = (
        part.gather(2, lookup).unflatten(2, shape).masked_fill(~tokens[:, None, ..., None], 0) for part in qkv
    )
    sizes = (row_covered[:, None] - index * size).clamp(min=1).minimum(size) + 2 * extension
    return Chunks(q, k, v, tokens[:, None], sizes[:, None, :, None], exists, size)


def _cut_grid(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    grid: tuple[int, int],
    window: int,
    extension: int,
    chunk_size: int | None,
    landmarks: int | None,
) -> Chunks:
    """Square chunks. Means run over tokens and the zeros beyond the border, but not over padded cells."""
    covered = tuple(count * window for count in windows_in(grid, window))
    side = chunk_size or max(1, math.isqrt(covered[0] * covered[1] // (landmarks or 1)))
    counts = tuple(max(1, cells // side) if extension else -(-cells // side) for cells in covered)
    mask = cell_mask(layout.valid, grid, qkv[0].device)
    parts = [part.unflatten(2, grid) for part in qkv]
    if layout.valid is not None:
        parts = [part.masked_fill(~mask, 0) for part in parts]
    q, k, v, tokens = (partition(part, side, (extension, extension), counts) for part in (*parts, mask))
    inner = tuple(max(cells, count * side) for cells, count in zip(covered, counts, strict=True))
    inside = partition(mask.new_ones((1, 1, *inner, 1)), side, (extension, extension), counts)
    sizes = (tokens | ~inside).sum(-2).clamp(min=1)
    exists = tokens.any(-2)[:, 0, :, 0]
    return Chunks(q, k, v, tokens.squeeze(-1), sizes, exists, side)
