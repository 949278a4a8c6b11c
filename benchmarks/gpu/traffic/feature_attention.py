"""Linear attention through exponential features: sums over keys or queries, and what reads them.

Where there is a mask, all positions count as keys.
"""

from types import SimpleNamespace

from benchmarks.gpu.traffic import Traffic, blocks, dot_kind, loaded, traffic
from benchmarks.gpu.triton_launches import Launch


def _scores(k: SimpleNamespace, times: int) -> int:
    """FLOPs of the features of a chunk, `times` over."""
    return times * 2 * k.CHUNK * k.FEATURES * k.WIDTH


@traffic("feature_attention.sum_keys")
def sum_keys(launch: Launch) -> Traffic:
    k = launch.arguments
    item, pairs, tiles = k.qkv.element_size(), launch.grid[0] // -(-k.time // (k.BLOCKS * k.CHUNK)), launch.grid[1]
    others = 0 if k.ONE_TILE else k.features * k.width * k.matrix.element_size()
    loads = stores = 0
    for length in blocks(k.time, k.BLOCKS * k.CHUNK):
        tokens = length * (2 * k.width * item + (k.mask is not None))
        for tile, features in enumerate(blocks(k.features, k.FEATURES)):
            own = features * k.width * k.matrix.element_size()
            loads += loaded(tokens + (others or own), tokens + own + k.BLOCKS * others)
            stores += 4 * features * (k.width + 1) + (4 * (k.width + 2) if tile == 0 else 0)
    times = 1 if k.ONE_TILE else 1 + tiles
    dots = launch.programs * k.BLOCKS * (_scores(k, times) + 2 * k.FEATURES * k.CHUNK * k.WIDTH)
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): dots})


@traffic("feature_attention.read_sums")
def read_sums(launch: Launch) -> Traffic:
    k = launch.arguments
    item, pairs, tiles = k.qkv.element_size(), launch.grid[0] // -(-k.time // k.CHUNK), -(-k.features // k.FEATURES)
    matrix = k.features * k.width * k.matrix.element_size()
    sums = k.features * k.width * k.states.element_size() + 4 * (k.features + k.width + 1)
    sides = 1 + k.CAUSAL
    loads = stores = 0
    for length in blocks(k.time, k.CHUNK):
        tokens = length * (1 + 2 * k.CAUSAL) * k.width * item
        if k.CAUSAL:
            tokens += 4 + length * (k.mask is not None)
        loads += loaded(tokens + matrix + sums, tokens + 2 * sides * matrix + sums)
        stores += length * (k.width * item + 4 * (3 + k.CAUSAL))
    dots = tiles * (_scores(k, 2 * sides) + 2 * k.CHUNK * k.FEATURES * k.WIDTH)
    if k.CAUSAL:
        dots += 2 * k.CHUNK * k.CHUNK * (tiles * k.FEATURES + k.WIDTH)
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): launch.programs * dots})


@traffic("feature_attention.sum_queries")
def sum_queries(launch: Launch) -> Traffic:
    k = launch.arguments
    items = k.qkv.element_size() + k.grad.element_size() + k.out.element_size()
    pairs = launch.grid[0] // -(-k.time // (k.BLOCKS * k.CHUNK))
    loads = stores = 0
    for length in blocks(k.time, k.BLOCKS * k.CHUNK):
        tokens = length * (k.width * items + 4 * (3 + k.CAUSAL)) + 4 * k.CAUSAL
        for tile, features in enumerate(blocks(k.features, k.FEATURES)):
            rest = tokens + features * k.width * k.matrix.element_size()
            loads += loaded(rest, rest + 4 * length)  # divisors are read twice
            stores += 4 * features * (k.width + 1) + (4 * (k.width + length) if tile == 0 else 0)
    dots = launch.programs * k.BLOCKS * (_scores(k, 1) + 2 * k.FEATURES * k.CHUNK * k.WIDTH)
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): dots})


@traffic("feature_attention.query_gradients")
def query_gradients(launch: Launch) -> Traffic:
    k = launch.arguments
    item, pairs, tiles = k.qkv.element_size(), launch.grid[0] // -(-k.time // k.CHUNK), -(-k.features // k.FEATURES)
    matrix = k.features * k.width * k.matrix.element_size()
    sums = k.features * k.width * k.states.element_size() + 4 * (k.features + k.width + 1)
    loads = stores = 0
    for length in blocks(k.time, k.CHUNK):
        tokens = length * ((1 + 2 * k.CAUSAL) * k.width * item + k.width * k.grad.element_size() + 4 * (3 + k.CAUSAL))
        if k.CAUSAL:
            tokens += 4 + length * (k.mask is not None)
        loads += loaded(tokens + matrix + sums, tokens + (1 + k.CAUSAL) * matrix + sums)
        stores += length * k.width * k.d_qkv.element_size()
        stores += 4 * k.features * k.width if k.d_matrix is not None else 0
    dots = _scores(k, 3 + k.CAUSAL + (k.d_matrix is not None))
    if k.CAUSAL:
        dots += 2 * k.CHUNK * k.CHUNK * k.FEATURES
    pairs_of_chunk = 2 * k.CHUNK * k.CHUNK * k.WIDTH if k.CAUSAL else 0
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): launch.programs * (tiles * dots + pairs_of_chunk)})


@traffic("feature_attention.key_gradients")
def key_gradients(launch: Launch) -> Traffic:
    k = launch.arguments
    item, pairs, tiles = k.qkv.element_size(), launch.grid[0] // -(-k.time // k.CHUNK), -(-k.features // k.FEATURES)
    matrix = k.features * k.width * k.matrix.element_size()
    sums = k.features * k.width * k.states.element_size() + 4 * (k.features + k.width)
    loads = stores = 0
    for length in blocks(k.time, k.CHUNK):
        tokens = length * (2 * k.width * item + (k.mask is not None)) + 4  # and a log scale
        again = 0
        if k.CAUSAL:
            tokens += length * (k.width * (item + k.grad.element_size()) + 20)
            again = length * (k.width * k.grad.element_size() + 8)  # gradients, divisors and log scales
        loads += loaded(tokens + matrix + sums, tokens + again + (1 + 3 * k.CAUSAL) * matrix + sums)
        stores += length * 2 * k.width * k.d_qkv.element_size()
        stores += 4 * k.features * k.width if k.d_matrix is not None else 0
    dots = _scores(k, 4 + 3 * k.CAUSAL + (k.d_matrix is not None))
    if k.CAUSAL:
        dots += 2 * 2 * k.CHUNK * k.CHUNK * k.FEATURES
    pairs_of_chunk = 2 * 2 * k.CHUNK * k.CHUNK * k.WIDTH if k.CAUSAL else 0
    return Traffic(pairs * loads, pairs * stores, {dot_kind(k): launch.programs * (tiles * dots + pairs_of_chunk)})
