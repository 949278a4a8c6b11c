"""Scores of primal attention: projections of tokens or of running sums, and their gradients."""

from benchmarks.gpu.traffic import Traffic, blocks, dot_kind, loaded, traffic
from benchmarks.gpu.triton_launches import Launch


@traffic("primal_scores.sum_chunks")
def sum_chunks(launch: Launch) -> Traffic:
    k = launch.arguments
    rows = launch.grid[0] // -(-k.time // k.CHUNK) * launch.grid[1]
    return Traffic(rows * k.time * k.width * k.qk.element_size(), launch.programs * 4 * k.width)


@traffic("primal_scores.project")
def project(launch: Launch) -> Traffic:
    k = launch.arguments
    rows = launch.grid[0] // -(-k.time // (k.BLOCKS * k.CHUNK)) * launch.grid[1]
    per_program = k.width * k.rank * k.weights.element_size() + (0 if k.lengths is None else 8)
    loads = launch.programs * (per_program + (0 if k.starts is None else 4 * k.width))
    loads += rows * k.time * k.width * k.qk.element_size()
    stores = rows * k.time * k.rank * k.scores.element_size() + launch.programs * 4 * k.rank
    return Traffic(loads, stores, {dot_kind(k): launch.programs * k.BLOCKS * 2 * k.CHUNK * k.WIDTH * k.RANK})


@traffic("primal_scores.score_gradients")
def score_gradients(launch: Launch) -> Traffic:
    k = launch.arguments
    segments = blocks(k.time, k.BLOCKS * k.CHUNK)
    rows = launch.grid[0] // len(segments) * launch.grid[1]
    per_program = k.width * k.rank * k.weights.element_size() + 4 * k.rank + (0 if k.lengths is None else 8)
    vectors = 4 * k.width * ((k.starts is not None) + (k.ends is not None))
    loads = sum(
        loaded(*[per_program + vectors + n * (k.width * k.qk.element_size() + k.rank * k.grad.element_size())] * 2)
        for n in segments
    )
    stores = launch.programs * 4 * k.width * (k.sums is not None)
    stores += launch.programs * 4 * k.width * k.rank * (k.d_weights is not None)
    stores += rows * k.time * k.width * k.d_qk.element_size() if k.d_qk is not None else 0
    products = 2 + (k.d_weights is not None)
    dots = launch.programs * k.BLOCKS * products * 2 * k.CHUNK * k.WIDTH * k.RANK
    return Traffic(rows * loads, stores, {dot_kind(k): dots})
