"""The causal scan: one kernel carries sums from chunk to chunk, another forms the pairs within a chunk."""

from benchmarks.gpu.hardware import FLOAT32_DOT
from benchmarks.gpu.traffic import Traffic, blocks, traffic
from benchmarks.gpu.triton_launches import Launch


@traffic("scan._carry")
def carry(launch: Launch) -> Traffic:
    """A program walks over time with one tile of the state."""
    k = launch.arguments
    item, pairs, chunks = k.a.element_size(), launch.grid[0], -(-k.time // k.CHUNK)
    loads = stores = 0
    for rows in blocks(k.rows, k.TILE):
        for columns in blocks(k.columns, k.TILE):
            loads += rows * columns + k.time * (rows + columns) + k.time + 1  # the log scales, and the one before
            stores += (chunks + 1) * rows * columns
    dots = launch.programs * chunks * 2 * k.CHUNK * k.TILE * k.TILE
    return Traffic(pairs * loads * item, pairs * stores * item, {FLOAT32_DOT: dots})


@traffic("scan._mix")
def mix(launch: Launch) -> Traffic:
    """A program has one chunk and one tile of columns, and reads the chunk's other operands whole."""
    k = launch.arguments
    item, chunks = k.a.element_size(), -(-k.time // k.CHUNK)
    pairs, pieces = launch.grid[0] // chunks, -(-k.inner // k.TILE)
    loads = 0
    for columns in blocks(k.columns, k.TILE):
        operands = k.time * (2 * k.inner + columns) + chunks * k.inner * columns
        loads += operands + k.time + chunks  # the log scales, and the one before each chunk
    per_program = pieces * 2 * k.CHUNK * k.TILE * (k.CHUNK + k.TILE) + 2 * k.CHUNK * k.CHUNK * k.TILE
    stored = k.out.numel() * k.out.element_size()
    return Traffic(pairs * loads * item, stored, {FLOAT32_DOT: launch.programs * per_program})
