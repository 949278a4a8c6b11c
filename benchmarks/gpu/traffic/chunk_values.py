"""Values and means of chunks: a program has one chunk and one head, and goes over its positions once.

Masks are taken to keep everything. Chunks of a size for each row are counted as if all of them covered the sequence.
"""

from types import SimpleNamespace

from benchmarks.gpu.traffic import Traffic, traffic
from benchmarks.gpu.triton_launches import Launch

STATISTIC = 4
"""Bytes of the logarithm of a sum."""


@traffic("chunk_values.average")
def average(launch: Launch) -> Traffic:
    """Keys, values and w; a product with each number of both."""
    k = launch.arguments
    vectors, positions = launch.programs, _positions(launch)
    read = positions * (2 * k.WIDTH * k.qkv.element_size()) + vectors * k.WIDTH * k.w.element_size()
    written = vectors * (k.WIDTH * k.u.element_size() + STATISTIC)
    return Traffic(read + _of_masks(k, launch), written, flops=8 * positions * k.WIDTH)


@traffic("chunk_values.add_gradients")
def add_gradients(launch: Launch) -> Traffic:
    """The same with u and its gradient; gradients of keys and values are read and written."""
    k = launch.arguments
    vectors, positions = launch.programs, _positions(launch)
    of_vectors = sum(one.element_size() for one in (k.w, k.u, k.grad)) * k.WIDTH + STATISTIC
    gradients = positions * 2 * k.WIDTH * k.d_qkv.element_size()
    read = positions * 2 * k.WIDTH * k.qkv.element_size() + vectors * of_vectors + gradients
    written = gradients + vectors * k.WIDTH * k.d_w.element_size()
    return Traffic(read + _of_masks(k, launch), written, flops=16 * positions * k.WIDTH)


@traffic("chunk_values.means_of_members")
def means_of_members(launch: Launch) -> Traffic:
    """Queries, keys and divisors."""
    k = launch.arguments
    read = _positions(launch) * 2 * k.WIDTH * k.qkv.element_size() + 8 * launch.programs
    written = 2 * k.q_means.numel() * k.q_means.element_size()
    return Traffic(read + _of_masks(k, launch), written, flops=2 * _positions(launch) * k.WIDTH)


@traffic("chunk_values.add_to_members")
def add_to_members(launch: Launch) -> Traffic:
    """Gradients of queries and keys are read and written."""
    k = launch.arguments
    gradients = _positions(launch) * 2 * k.WIDTH * k.qkv.element_size()
    read = gradients + sum(one.numel() * one.element_size() for one in (k.q_grad, k.k_grad)) + 8 * launch.programs
    return Traffic(read + _of_masks(k, launch), gradients, flops=2 * _positions(launch) * k.WIDTH)


def _positions(launch: Launch) -> int:
    """Of all programs together."""
    k = launch.arguments
    covered = k.time if k.sizes is not None else min(k.time, k.chunks * k.size)
    return launch.programs // k.chunks * covered


def _of_masks(k: SimpleNamespace, launch: Launch) -> int:
    """Bytes of the mask, and of the sizes of chunks."""
    return (_positions(launch) if k.mask is not None else 0) + (8 * launch.programs if k.sizes is not None else 0)
