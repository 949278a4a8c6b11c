"""Window attention: a program has some queries of a window, some keys, or some summaries, and one head.

Masks are taken to keep everything, as what they hide depends on the batch.
"""

from collections.abc import Iterator
from math import prod
from types import SimpleNamespace

from benchmarks.gpu.hardware import FLOAT32, FLOAT32_DOT, TENSOR
from benchmarks.gpu.traffic import Traffic, blocks, loaded, traffic
from benchmarks.gpu.triton_launches import Launch

STATISTIC = 4
"""Bytes of the logarithm of a sum, or of a delta."""


@traffic("window_attention.attend")
def attend(launch: Launch) -> Traffic:
    """A softmax over the keys of a window and the summaries, whose products with queries and probabilities are two."""
    k = launch.arguments
    moved, tiles = _of_queries(k, k.WIDTH * k.qkv.element_size())
    stored = k.y.numel() * k.y.element_size() + k.log_sums.numel() * STATISTIC
    return Traffic(k.heads * moved, stored, _dots(k, k.heads * 2 * tiles, k.QUERIES))


@traffic("window_attention.query_gradients")
def query_gradients(launch: Launch) -> Traffic:
    """The same with y and its gradient, and one product more."""
    k = launch.arguments
    moved, tiles = _of_queries(k, 3 * k.WIDTH * k.qkv.element_size() + STATISTIC)
    stored = k.y.numel() * k.y.element_size() + k.log_sums.numel() * STATISTIC
    return Traffic(k.heads * moved, stored, _dots(k, k.heads * 3 * tiles, k.QUERIES))


@traffic("window_attention.key_gradients")
def key_gradients(launch: Launch) -> Traffic:
    """Keys and values of a window's cells; of every window that sees some of them q, the gradient of y, two numbers."""
    k = launch.arguments
    batch, item, cells = k.grad.shape[0], k.qkv.element_size(), k.WINDOW**k.AXES
    moved = tiles = 0
    for own in _corners(k):
        for first in range(0, cells, k.KEYS):
            keys = range(first, min(first + k.KEYS, cells))
            moved += len(keys) * (2 * k.WIDTH * item + (k.mask is not None))
            for other in _neighbours(k, own):
                begin = max(own[1] + first - other[1], 0) // k.QUERIES * k.QUERIES if k.CAUSAL else 0
                queries = range(begin, cells)
                moved += len(queries) * (2 * k.WIDTH * item + 2 * STATISTIC)
                tiles += len(blocks(len(queries), k.QUERIES))
                if k.bias is not None:
                    seen = [number for key in keys if (number := _number(k, own, key, other)) is not None]
                    moved += _pairs(k, queries, seen) * k.bias.element_size()
    stored = 2 * k.grad.numel() * item
    return Traffic(batch * k.heads * moved, stored, _dots(k, batch * k.heads * 4 * tiles * k.QUERIES, k.KEYS))


@traffic("window_attention.summary_gradients")
def summary_gradients(launch: Launch) -> Traffic:
    """Some summaries, and of `span` queries q, the gradient of y and two numbers, in tiles that see some of them."""
    k = launch.arguments
    batch, item = k.grad.shape[0], k.qkv.element_size()
    summary = k.WIDTH * (k.far_k.element_size() + k.far_v.element_size()) + (k.far_mask is not None)
    moved = tiles = 0
    for size in _chunk_sizes(k, batch):
        for part in range(launch.grid[1]):
            positions = range(part * k.span, min((part + 1) * k.span, k.cells))
            for first in range(0, k.count, k.COUNT):
                moved += min(k.COUNT, k.count - first) * summary
                moved += 8 if k.chunks is not None and len(positions) else 0
                for start in positions[:: k.QUERIES]:
                    queries = min(k.QUERIES, k.cells - start)
                    if (start + queries - 1) // size > first if k.LATER else True:
                        moved += queries * (2 * k.WIDTH * item + 2 * STATISTIC)
                        tiles += 1
    stored = k.d_far.numel() * k.d_far.element_size()
    return Traffic(k.heads * moved, stored, _dots(k, k.heads * 4 * tiles * k.QUERIES, k.COUNT))


@traffic("window_attention.bias_gradients")
def bias_gradients(launch: Launch) -> Traffic:
    """A tile of the bias, and of `span` windows one after the other q, the gradient of y, two numbers, k and v."""
    k = launch.arguments
    item, cells, keys = k.qkv.element_size(), k.WINDOW**k.AXES, k.SIDE**k.AXES
    corners = list(_corners(k))
    moved = tiles = 0
    for part in range(launch.grid[2]):
        windows = range(part * k.span, min((part + 1) * k.span, k.all_windows))
        for start in range(0, keys, k.KEYS):
            there = [
                [(window // k.windows, place, number) for number in range(start, min(start + k.KEYS, keys))
                 if (place := _place(k, corners[window % k.windows], number)) is not None]
                for window in windows
            ]  # fmt: skip
            of_key = 2 * k.WIDTH * item + (k.mask is not None)
            different = len({(row, place) for window in there for row, place, _ in window})
            for first in range(0, cells, k.QUERIES):
                queries = range(first, min(first + k.QUERIES, cells))
                of_queries = len(windows) * len(queries) * (2 * k.WIDTH * item + 2 * STATISTIC)
                biases = [{(q, n) for q in queries for _, _, n in window if _sees(k, q, n)} for window in there]
                bias = k.bias.element_size()
                moved += of_queries + loaded(
                    different * of_key + len(set().union(*biases)) * bias,
                    sum(map(len, there)) * of_key + sum(map(len, biases)) * bias,
                )
                tiles += len(windows)
    stored = k.d_bias.numel() * k.d_bias.element_size()
    return Traffic(k.heads * moved, stored, _dots(k, k.heads * 2 * tiles * k.KEYS, k.QUERIES))


# ---------------------------------------------------------------------- what queries see


def _of_queries(k: SimpleNamespace, of_query: int) -> tuple[int, int]:
    """Bytes that programs of queries load for one head of a batch, and the keys and summaries in tiles they go over.

    of_query: the bytes that belong to a query itself.
    """
    batch, item, cells, keys = k.y.shape[0], k.qkv.element_size(), k.WINDOW**k.AXES, k.SIDE**k.AXES
    of_key = 2 * k.WIDTH * item + (k.mask is not None)
    moved = tiles = 0
    for corner in _corners(k):
        places = [_place(k, corner, number) is not None for number in range(keys)]
        for first in range(0, cells, k.QUERIES):
            queries = range(first, min(first + k.QUERIES, cells))
            last = min(first + k.QUERIES + k.BACK, k.SIDE) if k.CAUSAL else keys
            visited = range(0, last, k.KEYS)
            there = [number for number in range(min(len(visited) * k.KEYS, keys)) if places[number]]
            moved += batch * (len(queries) * of_query + len(there) * of_key)
            tiles += batch * len(visited) * k.KEYS
            if k.bias is not None:
                moved += batch * _pairs(k, queries, there) * k.bias.element_size()
            if k.far_k is None:
                continue
            of_summary = k.WIDTH * (k.far_k.element_size() + k.far_v.element_size()) + (k.far_mask is not None)
            for size in _chunk_sizes(k, batch):
                limit = min((corner[1] + queries[-1]) // size, k.count) if k.LATER else k.count
                visited = range(0, limit, k.COUNT)
                moved += min(len(visited) * k.COUNT, k.count) * of_summary + (8 if k.chunks is not None else 0)
                tiles += len(visited) * k.COUNT
    return moved, tiles


def _corners(k: SimpleNamespace) -> Iterator[tuple[int, int]]:
    """Row and column of the first cell of every window."""
    for top in range(0, k.rows, k.WINDOW):
        for left in range(0, k.columns, k.WINDOW):
            yield top, left


def _neighbours(k: SimpleNamespace, own: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The corners of windows that see some cells of one."""
    before, after = (k.SIDE - k.BACK - 1) // k.WINDOW * k.WINDOW, (k.BACK + k.WINDOW - 1) // k.WINDOW * k.WINDOW
    tops = range(max(own[0] - before, 0), min(own[0] + after + 1, k.rows), k.WINDOW) if k.AXES == 2 else [0]
    for top in tops:
        for left in range(max(own[1] - before, 0), min(own[1] + after + 1, k.columns), k.WINDOW):
            yield top, left


def _place(k: SimpleNamespace, corner: tuple[int, int], number: int) -> int | None:
    """The cell that is a key of a window, None where the grid ends."""
    row = corner[0] + (number // k.SIDE - k.BACK if k.AXES == 2 else 0)
    column = corner[1] + number % k.SIDE - k.BACK
    return row * k.columns + column if 0 <= row < k.rows and 0 <= column < k.columns else None


def _number(k: SimpleNamespace, own: tuple[int, int], cell: int, other: tuple[int, int]) -> int | None:
    """Which key of another window a cell of one is, None if it is none."""
    row = own[0] + (cell // k.WINDOW if k.AXES == 2 else 0) - other[0] + (k.BACK if k.AXES == 2 else 0)
    column = own[1] + cell % k.WINDOW - other[1] + k.BACK
    if 0 <= column < k.SIDE and 0 <= row < (k.SIDE if k.AXES == 2 else 1):
        return row * k.SIDE + column
    return None


def _sees(k: SimpleNamespace, query: int, key: int) -> bool:
    return not k.CAUSAL or key <= query + k.BACK


def _pairs(k: SimpleNamespace, queries: range, keys: list[int]) -> int:
    """How often a query sees a key."""
    if not k.CAUSAL:
        return len(queries) * len(keys)
    return sum(_sees(k, query, key) for query in queries for key in keys)


def _chunk_sizes(k: SimpleNamespace, batch: int) -> list[int]:
    """Of every row; those in a tensor, whose numbers are not known, as of chunks of a single position."""
    return [k.chunk or 1] * batch


def _dots(k: SimpleNamespace, columns: int, rows: int) -> dict[str, int]:
    """FLOPs of products of tiles of `rows` rows, CHANNELS deep, with so many columns together."""
    kind = TENSOR if k.qkv.element_size() == 2 else FLOAT32 if k.PRECISION == "tf32" else FLOAT32_DOT
    return {kind: 2 * prod((columns, rows, k.CHANNELS))}
