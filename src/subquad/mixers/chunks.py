"""Chunks of EVA: which positions each chunk summarises, also when every row of a batch has its own chunk size."""

import math
from typing import NamedTuple, overload

import torch
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.chunk_values import members
from subquad.kernels.window_attention.reference import partition

QKV = tuple[Tensor, ...]


class Chunks(NamedTuple):
    """Tokens by chunk; vectors at cells that are not tokens are zero.

    q, k, v: (batch, heads, chunks, cells, d). cells_mask: (batch or 1, 1, chunks, cells) bool, True at tokens.
    sizes: (batch or 1, 1, chunks, 1), what a chunk's mean divides by. mask: (batch or 1, chunks) bool, True where a row
    has the chunk; None: all rows have all. length: tokens per chunk, an int, or (batch, 1) when each row has its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cells_mask: Tensor
    sizes: Tensor
    mask: Tensor | None
    length: int | Tensor


class ChunkCounts(NamedTuple):
    """What there is in chunks that lie side by side.

    begin: (batch or 1, chunks), the first cell of each; step: their size, a number or (batch, 1); end: the tokens of a
    row, likewise. sizes: (batch or 1, chunks, 1), what means divide by. mask: (batch, chunks) bool, True where a row
    has the chunk; None: all rows have all.
    """

    begin: Tensor
    step: int | Tensor
    end: int | Tensor
    sizes: Tensor
    mask: Tensor | None

    @property
    def num_tokens(self) -> Tensor:
        """How many tokens a chunk has: (batch or 1, chunks, 1)."""
        return _clamped(self.end - self.begin, 0, self.step)[..., None]


def side_by_side(
    x: Tensor, time: int, cells: int, lengths: Tensor | None, size: int | Tensor, window: int, landmarks: int | None
) -> ChunkCounts:
    """Chunks of `size` tokens of x (batch, any, C), of which `time` are there. A remainder makes a short last chunk.

    cells: what whole windows cover. lengths: (batch,) tokens of padded rows. size: one number, or (batch,) one for each
    row, made for this number of landmarks.
    """
    step = size if isinstance(size, int) else size[:, None]
    if isinstance(size, int):
        count = -(-cells // size)
    else:
        assert lengths is not None
        assert landmarks is not None
        count = _most_chunks(cells, whole_windows(lengths, window), size, landmarks)
    begin = (torch.arange(count, device=x.device) * step).view(-1, count)
    end: int | Tensor = time if lengths is None else lengths[:, None]
    rest = cells - begin if lengths is None else whole_windows(lengths, window)[:, None] - begin
    mask = None if lengths is None else rest > 0
    return ChunkCounts(begin, step, end, _clamped(rest, 1, step)[..., None], mask)


def _clamped(x: Tensor, least: int, most: int | Tensor) -> Tensor:
    return x.clamp(least, most) if isinstance(most, int) else x.clamp(min=least).clamp(max=most)


def sums_of_tokens(x: Tensor, size: int | Tensor, count: int) -> Tensor:
    """Sums of x (batch, time, C), zero where it is padded, over `count` chunks side by side: (batch, count, C)."""
    if isinstance(size, int):
        return partition(x.unsqueeze(1), size, (0, 0), (count,)).squeeze(1).sum(2)
    return members(size, count, x.shape[1]).to(x.dtype) @ x


def _most_chunks(time: int, row_length: Tensor, size: Tensor, landmarks: int) -> int:
    """The number of chunks of the row that has most, or a bound where nobody may look at the rows."""
    most = 2 * landmarks - 1  # floor(P / M) = r gives at most ceil((r M + M - 1) / r) chunks
    if size.device.type == "cpu" and tracing.may_read_values(size) and size.numel():
        return int((-(-row_length // size)).max())
    return most if tracing.is_symbolic(time) else max(1, min(time, most))


@overload
def chunk_length(cells: int, landmarks: int, least: int) -> int: ...


@overload
def chunk_length(cells: Tensor, landmarks: int, least: int) -> Tensor: ...


def chunk_length(cells: int | Tensor, landmarks: int, least: int) -> int | Tensor:
    """Tokens of a chunk, for about as many chunks as landmarks in so many cells; at least `least`, if there are."""
    if isinstance(cells, Tensor):
        return (cells // landmarks).maximum(cells.clamp(1, least))
    return max(cells // landmarks, min(cells, least))


def cut(
    qkv: QKV,
    shape: tuple[int, ...],
    mask: Tensor | None,
    lengths: Tensor | None,
    window: int,
    extension: int,
    chunk_size: int | None,
    landmarks: int | None,
    least: int,
) -> Chunks:
    """Cuts q, k, v (batch, heads, N, d) into chunks of `chunk_size` tokens per axis, or into about `landmarks` chunks.

    shape: what whole windows cover, N cells; mask: (batch or 1, N) bool, True at tokens, None = all are.
    lengths: (batch,) tokens of padded sequences. Given landmarks, chunks of a sequence have the `chunk_length` of what
    whole windows cover of the row itself. Chunks reach `extension` cells further on each side, as windows do. A
    remainder shorter than a chunk is dropped when they do, and makes a short last chunk when they do not.
    """
    if len(shape) == 2:
        return _cut_grid(qkv, shape, mask, extension, chunk_size, landmarks)
    if landmarks is not None and (lengths is not None or not tracing.may_branch_on_length()):
        # Slices of a symbolic size would cost compiled code a graph for every length; lookups do not.
        return _cut_rows(qkv, mask, lengths, window, extension, landmarks, least)
    size = chunk_size or chunk_length(shape[0], landmarks or 1, least)
    count = _count(shape[0], size, extension)
    q, k, v, cells_mask = _parts(qkv, shape, mask, size, extension, (count,))
    begin = torch.arange(count, device=q.device) * size
    chunk_mask = None
    row_length: Tensor | int = shape[0]
    if lengths is not None:
        row_length = whole_windows(lengths, window)[:, None]
        chunk_mask = begin < row_length
    sizes = (row_length - begin).clamp(1, size) + 2 * extension
    return Chunks(q, k, v, cells_mask.squeeze(-1), sizes.view(-1, 1, count, 1), chunk_mask, size)


def _cut_rows(
    qkv: QKV, mask: Tensor | None, lengths: Tensor | None, window: int, extension: int, landmarks: int, least: int
) -> Chunks:
    """Every row has its own chunk size: positions are looked up instead of sliced."""
    batch, heads, time, width = qkv[0].shape
    if lengths is None:
        assert mask is not None  # compiled code always has one
        lengths = mask.sum(1)
    most = 2 * landmarks - 1  # floor(P / M) = r gives at most ceil((r M + M - 1) / r) chunks
    if tracing.is_symbolic(time):
        longest = time // landmarks + 1 + least
    else:
        longest, most = max(least, time // landmarks), max(1, min(time, most))
    row_length = whole_windows(lengths, window)[:, None]
    size = chunk_length(row_length, landmarks, least)
    index = torch.arange(most, device=lengths.device)
    chunk_mask = index < (row_length // size if extension else -(-row_length // size))
    cell = torch.arange(longest + 2 * extension, device=lengths.device)
    position = (index * size - extension)[..., None] + cell
    cells_mask = (cell < size[..., None] + 2 * extension) & (position >= 0) & (position < lengths[:, None, None])
    cells_mask = cells_mask & chunk_mask[..., None]
    lookup = position.clamp(0, time - 1).flatten(1)[:, None, :, None].expand(batch, heads, -1, width)
    q, k, v = (
        part.gather(2, lookup).unflatten(2, (most, cell.shape[0])).masked_fill(~cells_mask[:, None, ..., None], 0)
        for part in qkv
    )
    sizes = (row_length - index * size).clamp(min=1).minimum(size) + 2 * extension
    return Chunks(q, k, v, cells_mask[:, None], sizes[:, None, :, None], chunk_mask, size)


def _cut_grid(
    qkv: QKV,
    shape: tuple[int, ...],
    mask: Tensor | None,
    extension: int,
    chunk_size: int | None,
    landmarks: int | None,
) -> Chunks:
    """Square chunks. Means run over tokens and the zeros beyond the border, but not over padded cells."""
    side = chunk_size or max(1, math.isqrt(shape[0] * shape[1] // (landmarks or 1)))
    counts = tuple(_count(cells, side, extension) for cells in shape)
    q, k, v, cells_mask = _parts(qkv, shape, mask, side, extension, counts)
    tiled = tuple(max(cells, count * side) for cells, count in zip(shape, counts, strict=True))
    within = torch.ones((1, 1, *tiled, 1), dtype=torch.bool, device=q.device)
    beyond = ~partition(within, side, (extension, extension), counts)
    sizes = (cells_mask | beyond).sum(-2).clamp(min=1)
    return Chunks(q, k, v, cells_mask.squeeze(-1), sizes, cells_mask.any(-2).flatten(1), side)


def _parts(
    qkv: QKV, shape: tuple[int, ...], mask: Tensor | None, size: int, extension: int, counts: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """q, k, v and the mask, cut into chunks of one size."""
    if mask is None:
        mask = torch.ones((1, qkv[0].shape[2]), dtype=torch.bool, device=qkv[0].device)
    else:
        qkv = tuple(part.masked_fill(mask.logical_not()[:, None, :, None], 0) for part in qkv)
    parts = (part.unflatten(2, shape) for part in (*qkv, mask[:, None, :, None]))
    return tuple(partition(part, size, (extension, extension), counts) for part in parts)


def _count(cells: int, size: int, extension: int) -> int:
    return max(1, cells // size) if extension else -(-cells // size)


def whole_windows(lengths: Tensor, window: int) -> Tensor:
    """What whole windows cover of rows of these lengths."""
    return -(-lengths // window) * window
