"""The cross-entropy of words on the CPU: torch's products, and between them one kernel of numba.

A row of logits fits the second cache. It is read for its largest entry and its sum, turned into exponentials, and then
into the gradient of the loss, in its own place: plain torch writes probabilities to a second matrix, and reads both of
them several times. Sums have a fixed order, whatever the number of threads.
"""

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from subquad.kernels.cross_entropy import reference
from subquad.kernels.llvm.rows import exponentiating, raising_and_adding
from subquad.kernels.llvm.vectors import ONE, SIXTY_FOUR, unsigned
from subquad.kernels.numba_tools import compiled, run, view
from subquad.kernels.numba_tools import why_unavailable as why_unavailable

_raise_and_add_64, _exponentials_64 = raising_and_adding(64), exponentiating(64)


@compiled
def _losses(logits, target, nll, everything, smoothing, each, differentiate):  # type: ignore[no-untyped-def]
    """nll[r] = -log p(target[r]) and everything[r] = sum_v -log p(v) of rows (n, V), which become gradients.

    The gradient is p - each - (1 - smoothing - each) [v = target]. Without `differentiate` nothing sensible is left.
    """
    rows, vocab = logits.shape
    flat, n = logits.ravel(), unsigned(vocab)
    for row in prange(rows):
        tops, sums = np.full(64, -np.inf, flat.dtype), np.zeros(64, flat.dtype)
        top = np.empty(1, flat.dtype)
        start, end = unsigned(row) * n, (unsigned(row) + ONE) * n
        rest = end - n % SIXTY_FOUR
        chosen = start + unsigned(target[row])
        logit = flat[chosen]
        for at in range(start, rest, SIXTY_FOUR):
            _raise_and_add_64(tops, sums, flat, unsigned(at))
        for at in range(rest, end):
            tops[at - rest] = max(tops[at - rest], flat[at])
            sums[at - rest] += flat[at]
        added, top[0] = sums.sum(), tops.max()
        sums[:] = 0
        for at in range(start, rest, SIXTY_FOUR):
            _exponentials_64(sums, flat, unsigned(at), top, unsigned(0))
        for at in range(rest, end):
            flat[at] = math.exp(flat[at] - top[0])
            sums[at - rest] += flat[at]
        total = sums.sum()
        normaliser = top[0] + math.log(total)
        nll[row], everything[row] = normaliser - logit, vocab * normaliser - added
        if differentiate:
            share = 1 / total
            for at in range(start, end):
                flat[at] = flat[at] * share - each
            flat[chosen] += smoothing + each - 1


def row_losses(logits: Tensor, target: Tensor, smoothing: float, differentiate: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As that of the reference, but the gradient takes the place of the logits."""
    dtype, vocab = view(logits).dtype.type, logits.shape[1]
    _check_words(target, vocab)
    each = smoothing / max(1, vocab - 1)
    nll, everything = (logits.new_empty(len(target)) for _ in range(2))
    numbers = dtype(smoothing), dtype(each)
    run(_losses, view(logits), view(target), view(nll), view(everything), *numbers, differentiate)
    total_nll = nll.sum(dtype=torch.float64)
    total = (1 - smoothing - each) * total_nll + each * everything.sum(dtype=torch.float64) if smoothing else total_nll
    return total, total_nll, logits


def _check_words(target: Tensor, vocab: int) -> None:
    """The kernel reads and writes where a target points to."""
    if len(target):
        first, last = (int(word) for word in target.aminmax())
        if first < 0 or last >= vocab:
            raise IndexError(f"word {first if first < 0 else last} is a target, but there are {vocab} words, from 0 on")


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pad: int,
    smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of nll; see the public function. dtype: that of the products."""
    return reference.linear_cross_entropy(features, weight, bias, target, pad, smoothing, dtype, row_losses)
