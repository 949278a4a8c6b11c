"""Normaliser and largest entries of long rows, compiled by numba: see `vocabulary.py`.

torch's logsumexp writes its exponentials to memory; here they are added up where they are made, 64 sums at a time.
torch's topk sorts; here a row is read once, and the few entries above the smallest of the largest so far are put among
them: of n entries in any order about count * log(n / count).
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from subquad.kernels.numba_tools import (
    ONE,
    SIXTY_FOUR,
    compiled,
    index_type,
    load,
    plain,
    repeat,
    run,
    unsigned,
    vector_at,
    view,
)
from subquad.kernels.softmax_cpu import exponential


def _adding(width: int) -> Callable[..., None]:
    """sums[i] += exp(values[at + i] - shifts[row]), i < width."""

    @intrinsic
    def add_exponentials(_: Any, sums: Any, values: Any, at: Any, shifts: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (sums_type, values_type, _, shifts_type, _), (sums, values, at, shifts, row) = signature.args, args
            size = values_type.dtype.bitwidth // 8
            shift = load(builder, vector_at(context, builder, shifts_type, shifts, row, 1), size)
            x = load(builder, vector_at(context, builder, values_type, values, at, width), size)
            x = builder.fsub(x, repeat(builder, shift, width))
            pointer = vector_at(context, builder, sums_type, sums, row.type(0), width)
            total = builder.fadd(load(builder, pointer, size), exponential(builder, x, 8 * size))
            builder.store(total, pointer).align = size
            return context.get_dummy_value()

        return types.void(sums, values, index_type, shifts, index_type), generate

    return add_exponentials


_add_64 = _adding(64)


@compiled
def _log_sums(out, values, largest, count):  # type: ignore[no-untyped-def]
    """out[r] = largest[r] + log sum_i exp(values[r, i] - largest[r]), of flat arrays with `count` entries a row."""
    n = unsigned(count)
    for row in prange(out.size):
        sums = np.zeros(64, values.dtype)
        at, end = unsigned(row) * n, (unsigned(row) + ONE) * n
        while at + SIXTY_FOUR <= end:
            _add_64(sums, values, at, largest, unsigned(row))
            at += SIXTY_FOUR
        total = sums.sum()
        while at < end:
            total += math.exp(values[at] - largest[row])
            at += ONE
        out[row] = largest[row] + math.log(total)


@compiled
def _largest(found, places, values, count):  # type: ignore[no-untyped-def]
    """found[r], places[r]: the largest entries of row r of flat values with `count` entries a row, in falling order."""
    n, most = unsigned(count), found.shape[1]
    for row in prange(found.shape[0]):
        best = np.full(most, -np.inf, values.dtype)
        at = np.zeros(most, np.int64)
        taken = 0
        start = unsigned(row) * n
        least = best[0]
        for i in range(n):
            value = values[start + unsigned(i)]
            if value > least or taken < most:
                slot = min(taken, most - 1)
                while slot > 0 and best[slot - 1] < value:
                    best[slot], at[slot] = best[slot - 1], at[slot - 1]
                    slot -= 1
                best[slot], at[slot] = value, i
                taken = min(taken + 1, most)
                least = best[most - 1]
        for slot in range(most):
            found[row, slot], places[row, slot] = best[slot], at[slot]


def log_sum_exp(values: Tensor) -> Tensor:
    values = plain(values)
    largest = values.amax(-1)
    out = torch.empty_like(largest)
    run(_log_sums, view(out), view(values).ravel(), view(largest), values.shape[-1])
    return out


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values = plain(values)
    found = values.new_empty(values.shape[0], count)
    places = torch.empty(found.shape, dtype=torch.int64)
    run(_largest, view(found), view(places), view(values).ravel(), values.shape[-1])
    return found, places
