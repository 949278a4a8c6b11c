"""Dropout on the CPU, compiled by numba: one pass over the values, which makes its random bits itself.

torch's generator gives one seed of 64 bits for a call; value i is dropped or kept by draw i of a generator that counts
(`llvm/philox.py`). Nothing is kept for the backward pass but the seed: dropout is linear, and the gradient goes through
the same dropout again.
"""

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor, nn

from subquad.kernels.dropout import reference
from subquad.kernels.dropout.reference import LEAST, LEVELS
from subquad.kernels.llvm.philox import DRAWS, dropping
from subquad.kernels.llvm.vectors import unsigned
from subquad.kernels.numba_tools import compiled, run, view
from subquad.kernels.numba_tools import why_unavailable as why_unavailable

DTYPES = (torch.float32, torch.float64)
TASK_STEPS = 64
"""Steps of DRAWS values each of one task of a thread."""
_drop_some = dropping()


@compiled
def _drop(y, x, seed, dropped, scales):  # type: ignore[no-untyped-def]
    """y[i] = x[i] scales[0] where draw i under the seed is at least `dropped`, of 2^16 levels, else x[i] 0."""
    steps, rest = x.size // DRAWS, x.size % DRAWS
    for task in prange((steps + TASK_STEPS - 1) // TASK_STEPS):
        for step in range(task * TASK_STEPS, min((task + 1) * TASK_STEPS, steps)):
            _drop_some(y, x, unsigned(step * DRAWS), unsigned(step), seed, dropped, scales)
    if rest:
        given, result = np.zeros(DRAWS, x.dtype), np.empty(DRAWS, x.dtype)
        given[:rest] = x[steps * DRAWS :]
        _drop_some(result, given, unsigned(0), unsigned(steps), seed, dropped, scales)
        y[steps * DRAWS :] = result[:rest]


def dropout(x: Tensor, rate: float) -> Tensor:
    """x with values set to 0 at random, each with chance `rate` (to 1/65536), the others scaled to keep the mean."""
    if x.is_meta or type(x) not in (Tensor, nn.Parameter):
        return reference.dropout(x, rate)
    dropped = round(rate * LEVELS)
    if dropped == LEVELS:
        return x * 0.0
    seed = torch.empty((), dtype=torch.int64).random_(LEAST, None).item()
    return _Dropout.apply(x, seed, dropped)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, dropped: int) -> Tensor:
        ctx.seed, ctx.dropped = seed, dropped
        x = x.contiguous()
        y = torch.empty_like(x)
        scales = np.array([LEVELS / (LEVELS - dropped)], view(x).dtype)
        run(_drop, view(y).ravel(), view(x).ravel(), np.uint64(seed % 2**64), np.uint64(dropped), scales)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, ctx.seed, ctx.dropped), None, None
