"""What the Triton kernels of window attention share: where cells, keys and summaries are, and logits of tiles.

A sequence is a grid of one row, whose windows have one row. Cells of a window are counted row by row, and so are its
keys, which lie in a square (on a sequence: a stretch) of SIDE cells along each axis that begins BACK cells before the
window. Logits are to the base 2, and -inf where a query does not see.

Offsets of rows and windows are 64 bits wide, as a batch may hold more than 2^31 numbers; those within a window are
narrow, which keeps registers free.
"""

import triton
import triton.language as tl

from subquad.kernels.triton_tools import dot

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

# ---------------------------------------------------------------------- where things are


@triton.jit
def corner(window: tl.tensor, columns: tl.tensor, WINDOW: tl.constexpr, AXES: tl.constexpr) -> tuple:
    """Row and column of the first cell of a window."""
    if AXES == 1:
        return window * 0, window * WINDOW
    across = columns // WINDOW
    return window // across * WINDOW, window % across * WINDOW


@triton.jit
def places(
    number: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BACK: tl.constexpr,
    SIDE: tl.constexpr,
    AXES: tl.constexpr,
) -> tuple:
    """Cells number ... of the square of SIDE cells along each axis that begins BACK cells before (top, left).

    Returns where they are relative to (top, left), and whether they are in the square and in the grid.
    """
    if AXES == 1:
        place = number - BACK
        return place, (number < SIDE) & (left + place >= 0) & (left + place < columns)
    row, column = number // SIDE - BACK, number % SIDE - BACK
    in_rows = (top + row >= 0) & (top + row < rows) & (number < SIDE * SIDE)
    return row * columns + column, in_rows & (left + column >= 0) & (left + column < columns)


@triton.jit
def load(
    source: tl.tensor,
    place: tl.tensor,
    exists: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Vectors at some places, (places, CHANNELS), zeros where there are none and beyond the WIDTH of a head."""
    channel = tl.arange(0, CHANNELS)
    mask = exists[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + place[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store(
    target: tl.tensor,
    place: tl.tensor,
    exists: tl.tensor,
    stride: tl.tensor,
    values: tl.tensor,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """The inverse of `load`, in the precision of the target."""
    channel = tl.arange(0, CHANNELS)
    mask = exists[:, None] & (channel < WIDTH)[None, :]
    tl.store(target + place[:, None] * stride + channel[None, :], values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def kept(mask: tl.tensor, place: tl.tensor, exists: tl.tensor) -> tl.tensor:
    """Where a mask, if there is one, and `exists` are both true."""
    if mask is not None:
        exists = exists & (tl.load(mask + place, mask=exists, other=0) != 0)
    return exists


# ---------------------------------------------------------------------- logits and probabilities


@triton.jit
def window_logits(
    products: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    seen: tl.tensor,
    bias: tl.tensor,
    bias_query: tl.tensor,
    bias_key: tl.tensor,
    BACK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
) -> tl.tensor:
    """Logits of q.k for cells `query` and keys `key` of a window. Both are broadcast to products, and so is `seen`."""
    if CAUSAL:
        seen = seen & (key <= query + BACK)
    logits = products * (SCALE * LOG2_E)
    if bias is not None:
        logits += tl.load(bias + query * bias_query + key * bias_key, mask=seen, other=0.0).to(tl.float32) * LOG2_E
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def window_tile(
    q: tl.tensor,
    query: tl.tensor,
    exists: tl.tensor,
    start: tl.tensor,
    source: tl.tensor,
    cell_stride: tl.tensor,
    part_stride: tl.tensor,
    bias: tl.tensor,
    bias_query: tl.tensor,
    bias_key: tl.tensor,
    mask: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BACK: tl.constexpr,
    SIDE: tl.constexpr,
    AXES: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple:
    """Keys start .. start + KEYS - 1 of a window, their values, and the logits of queries (queries, KEYS)."""
    key = start + tl.arange(0, KEYS)
    place, seen = places(key, top, left, rows, columns, BACK, SIDE, AXES)
    k = load(source + part_stride, place, seen, cell_stride, WIDTH, CHANNELS)
    v = load(source + 2 * part_stride, place, seen, cell_stride, WIDTH, CHANNELS)
    seen = kept(mask, place, seen)[None, :] & exists[:, None]
    products = dot(q, tl.trans(k), PRECISION)
    logits = window_logits(
        products, query[:, None], key[None, :], seen, bias, bias_query, bias_key, BACK, CAUSAL, SCALE
    )
    return k, v, logits


@triton.jit
def summaries_seen(
    position: tl.tensor, count: tl.tensor, chunk: tl.tensor, chunks: tl.tensor, row: tl.tensor, LATER: tl.constexpr
) -> tl.tensor:
    """How many summaries, from the first on, queries at some positions see: all, or LATER those of ended chunks."""
    if LATER:
        if chunks is not None:
            chunk = tl.load(chunks + row).to(tl.int32)
        return tl.minimum(position // chunk, count)
    return position * 0 + count


@triton.jit
def summary_tile(
    q: tl.tensor,
    limit: tl.tensor,
    start: tl.tensor,
    far_k: tl.tensor,
    far_v: tl.tensor,
    far_mask: tl.tensor,
    count: tl.tensor,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple:
    """Summaries start .. start + COUNT - 1, and the logits of queries, each of which sees the first `limit`."""
    number = start + tl.arange(0, COUNT)
    f = load(far_k, number, number < count, WIDTH, WIDTH, CHANNELS).to(q.dtype)
    u = load(far_v, number, number < count, WIDTH, WIDTH, CHANNELS).to(q.dtype)
    seen = kept(far_mask, number, number < count)[None, :] & (number[None, :] < limit[:, None])
    return f, u, tl.where(seen, dot(q, tl.trans(f), PRECISION) * (SCALE * LOG2_E), float("-inf"))
