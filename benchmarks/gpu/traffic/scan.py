"""The causal scan: sums of every chunk, carried from chunk to chunk, and the pairs within a chunk."""

from benchmarks.gpu.hardware import FLOAT32_DOT
from benchmarks.gpu.traffic import Traffic, blocks, dot_kind, loaded, traffic
from benchmarks.gpu.triton_launches import Launch


@traffic("scan._carry_kernel")
def carry(launch: Launch) -> Traffic:
    """A program walks over groups of chunks with one tile of the state."""
    k = launch.arguments
    pairs, groups = launch.grid[0], -(-k.chunks // k.GROUP)
    loads = stores = 0
    for entries in blocks(k.entries, k.TILE):
        first = entries * k.first.element_size() if k.first is not None else 0
        scale = 4 if k.FUTURE or k.first_log_scale is not None else 0
        rest = first + scale + 4 * k.chunks * entries
        loads += loaded(rest + 4 * k.chunks, rest + 4 * (groups * k.GROUP if k.FUTURE else k.chunks))
        stores += k.chunks * entries * k.states.element_size() + 4 * entries
    scales = 0 if k.FUTURE else 4 * (k.chunks + 1)
    dots = launch.programs * groups * (1 + k.MIXED) * 2 * k.GROUP * k.GROUP * k.TILE
    return Traffic(pairs * loads, pairs * (stores + scales), {FLOAT32_DOT: dots})


@traffic("scan._sum_chunks_kernel")
def sum_chunks(launch: Launch) -> Traffic:
    """A program has one chunk and one tile of its sums."""
    k = launch.arguments
    pairs = launch.grid[0] // -(-k.time // k.CHUNK)
    loads = stores = 0
    for length in blocks(k.time, k.CHUNK):
        for rows in blocks(k.rows, k.ROWS):
            for column, columns in enumerate(blocks(k.columns, k.COLUMNS)):
                loads += length * (4 + rows * k.a.element_size() + columns * k.b.element_size())
                loads += (
                    4 + length * k.b.element_size() if k.FUTURE else 0
                )  # the log scale before, and the last channel
                stores += 4 * (rows * columns + (0 if k.FUTURE else 1) + (rows if column == 0 else 0))
    dots = launch.programs * 2 * k.CHUNK * k.ROWS * k.COLUMNS
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): dots})


@traffic("scan._mix_kernel")
def mix(launch: Launch) -> Traffic:
    """A program has one chunk and one tile of columns, and reads the chunk's other operands whole."""
    k = launch.arguments
    a, b, c, out = (t.element_size() for t in (k.a, k.b, k.c, k.out))
    pairs, pieces = launch.grid[0] // -(-k.time // k.CHUNK), -(-k.inner // k.INNER)
    loads = stores = 0
    for length in blocks(k.time, k.CHUNK):
        for column, columns in enumerate(blocks(k.columns, k.COLUMNS)):
            operands = length * (k.inner * (a + b) + columns * c) + 4 * k.inner * columns
            ones = 4 * k.inner if k.COLUMN_OF_ONES else 0
            if k.ONES:
                ones += 4 * columns + length * (b if k.ONES == "left" else a)
            rest = operands + ones + 4  # the log scale at the chunk's edge
            loads += loaded(rest + 4 * length, rest + 4 * k.CHUNK)
            stores += length * out * (columns + (1 if k.COLUMN_OF_ONES and column == 0 else 0))
    per_program = pieces * 2 * k.CHUNK * k.INNER * (k.CHUNK + k.COLUMNS) + 2 * k.CHUNK * k.CHUNK * k.COLUMNS
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): launch.programs * per_program})
