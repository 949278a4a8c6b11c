"""Normaliser and largest entries of long rows, compiled by numba: see `__init__.py`.

torch's logsumexp writes its exponentials to memory; here they are added up where they are made, 64 sums at a time.
torch's topk sorts; here the largest of every 64th entry are found first. At least `count` entries are not below the
count-th largest of those 64, so that a second reading, 64 at a time, meets little more than what is wanted. Where both
are asked for, they share the two readings of a row.
"""

import math

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from subquad.kernels.llvm.rows import adding, comparing, raising
from subquad.kernels.llvm.vectors import ONE, SIXTY_FOUR, unsigned
from subquad.kernels.numba_tools import compiled, plain, run, view
from subquad.kernels.numba_tools import why_unavailable as why_unavailable
from subquad.kernels.vocabulary import reference

DTYPES = (torch.float32, torch.float64)
_raise_64, _add_64, _any_of_64 = raising(64), adding(64), comparing(64)


@compiled
def _log_sums(out, values, count):  # type: ignore[no-untyped-def]
    """out[r] = top + log sum_i exp(values[r, i] - top), top = max_i values[r, i], of flat rows of `count` entries."""
    n = unsigned(count)
    for row in prange(out.size):
        sums, tops = np.zeros(64, values.dtype), np.full(64, -np.inf, values.dtype)
        start, end = unsigned(row) * n, (unsigned(row) + ONE) * n
        rest = end - n % SIXTY_FOUR
        for at in range(start, rest, SIXTY_FOUR):
            _raise_64(tops, values, unsigned(at))
        for at in range(rest, end):
            tops[0] = max(tops[0], values[at])
        tops[0] = tops.max()
        for at in range(start, rest, SIXTY_FOUR):
            _add_64(sums, values, unsigned(at), tops, unsigned(0))
        total = sums.sum()
        for at in range(rest, end):
            total += math.exp(values[at] - tops[0])
        out[row] = tops[0] + math.log(total)


@numba.njit(inline="always")
def _keep(best, at, value, place, held, bound):  # type: ignore[no-untyped-def]
    """Puts a value above the bound among the `held` ones, which fall; returns how many are held then.

    When all of `best` is held, the last drops out, and the bound is no lower than the last.
    """
    if value > bound[0]:
        slot = min(held, best.size - 1)
        held = slot + 1
        while slot > 0 and best[slot - 1] < value:
            best[slot], at[slot] = best[slot - 1], at[slot - 1]
            slot -= 1
        best[slot], at[slot] = value, place
        if held == best.size:
            bound[0] = max(bound[0], best[held - 1])
    return held


@numba.njit(inline="always")
def _bound_of(tops, best, at, bound):  # type: ignore[no-untyped-def]
    """Sets the bound just below the last of as many tops as `best` has places, where there are so many."""
    held = 0
    if best.size <= 64:
        for top in tops:
            held = _keep(best, at, top, 0, held, bound)
        bound[0] = np.nextafter(bound[0], tops.dtype.type(-np.inf))


@numba.njit(inline="always")
def _fill(best, at, held, values, start):  # type: ignore[no-untyped-def]
    """Fills the places that are not held when all that is left of a row is minus infinity, or not a number."""
    empty = start
    while held < best.size:
        if not values[empty] > -np.inf:
            best[held], at[held] = values[empty], empty - start
            held += 1
        empty += ONE


@compiled
def _largest(found, places, values, count):  # type: ignore[no-untyped-def]
    """found[r], places[r]: the largest entries of row r of flat values with `count` entries a row, in falling order."""
    n = unsigned(count)
    for row in prange(found.shape[0]):
        tops = np.full(64, -np.inf, values.dtype)
        start, end = unsigned(row) * n, (unsigned(row) + ONE) * n
        rest = end - n % SIXTY_FOUR
        for at in range(start, rest, SIXTY_FOUR):
            _raise_64(tops, values, unsigned(at))
        for at in range(rest, end):
            tops[at - rest] = max(tops[at - rest], values[at])
        best, at = found[row], places[row]
        bound, held = np.full(1, -np.inf, values.dtype), 0  # only what is above the bound counts
        _bound_of(tops, best, at, bound)
        for first in range(start, end, SIXTY_FOUR):
            if first == rest or _any_of_64(values, unsigned(first), bound, unsigned(0)):
                for place in range(first, min(first + SIXTY_FOUR, end)):
                    held = _keep(best, at, values[place], place - start, held, bound)
        _fill(best, at, held, values, start)


@compiled
def _normalised_largest(out, found, places, values, count, hidden):  # type: ignore[no-untyped-def]
    """`_log_sums` and then `_largest` without entry `hidden` of each row, which becomes -inf."""
    n = unsigned(count)
    for row in prange(found.shape[0]):
        sums, tops = np.zeros(64, values.dtype), np.full(64, -np.inf, values.dtype)
        bound, shift = np.full(1, -np.inf, values.dtype), np.empty(1, values.dtype)
        start, end = unsigned(row) * n, (unsigned(row) + ONE) * n
        rest = end - n % SIXTY_FOUR
        aside = values[start + unsigned(hidden)]
        values[start + unsigned(hidden)] = -np.inf
        for at in range(start, rest, SIXTY_FOUR):
            _raise_64(tops, values, unsigned(at))
        for at in range(rest, end):
            tops[at - rest] = max(tops[at - rest], values[at])
        shift[0] = max(tops.max(), aside)
        best, at = found[row], places[row]
        _bound_of(tops, best, at, bound)
        held, total = 0, math.exp(aside - shift[0])
        for first in range(start, rest, SIXTY_FOUR):
            _add_64(sums, values, unsigned(first), shift, unsigned(0))
            if _any_of_64(values, unsigned(first), bound, unsigned(0)):
                for place in range(first, first + SIXTY_FOUR):
                    held = _keep(best, at, values[place], place - start, held, bound)
        for place in range(rest, end):
            total += math.exp(values[place] - shift[0])
            held = _keep(best, at, values[place], place - start, held, bound)
        out[row] = shift[0] + math.log(total + sums.sum())
        _fill(best, at, held, values, start)


def log_sum_exp(values: Tensor) -> Tensor:
    values = plain(values)
    out = values.new_empty(values.shape[0])
    run(_log_sums, view(out), view(values).ravel(), values.shape[-1])
    return out


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values = plain(values)
    found = values.new_empty(values.shape[0], count)
    places = torch.empty(found.shape, dtype=torch.int64)
    run(_largest, view(found), view(places), view(values).ravel(), values.shape[-1])
    return found, places


def normalised_largest(values: Tensor, count: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    if not values.is_contiguous() or values.dtype not in DTYPES:  # the hidden column is written where it is
        return reference.normalised_largest(values, count, hidden)
    normaliser, found = values.new_empty(values.shape[0]), values.new_empty(values.shape[0], count)
    places = torch.empty(found.shape, dtype=torch.int64)
    arrays = view(normaliser), view(found), view(places), view(values).ravel()
    run(_normalised_largest, *arrays, values.shape[-1], hidden)
    return normaliser, found, places
