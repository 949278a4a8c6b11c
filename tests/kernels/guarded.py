"""A program that runs the CPU kernels which count addresses themselves on memory with forbidden pages around it.

python -m tests.kernels.guarded

Inputs, and what the kernels allocate, lie right behind one such page and then right before one: a kernel that reads or
writes a number too far ends the process. Numbers are ordinary ones, and such that comparisons with them fail: they must
not lead a kernel elsewhere. The last line that is printed tells the case.
"""

import ctypes
import math
import mmap
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subquad.kernels.conv import cpu as conv
from subquad.kernels.conv import tap_conv
from subquad.kernels.dropout import dropout
from subquad.kernels.gathered import gathered_attention
from subquad.kernels.linear import few_rows_linear, int8_linear, to_int8
from subquad.kernels.vocabulary import largest, log_sum_exp, normalised_largest
from tests.kernels.problems import Problem, drawn, every_problem

OPERATIONS = ("conv", "cross_entropy", "dropout", "gathered", "linear", "vocabulary")
VALUES = (None, math.nan, math.inf, -math.inf)
"""What some numbers of the inputs become; None: they stay. Only the vocabulary's kernels choose addresses by them."""
PAGE = mmap.PAGESIZE
FACTORIES = (torch.empty, torch.zeros, torch.empty_like, torch.zeros_like, Tensor.new_empty, Tensor.new_zeros)


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy of x whose memory begins where a page that must not be touched ends, or ends where one begins."""
    pages = max(1, -(-x.nbytes // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + page * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    offset = (pages + 1) * PAGE - x.nbytes if at_end else PAGE
    array = np.frombuffer(memory, x.numpy().dtype, x.numel(), offset)
    copy = torch.from_numpy(array).view(x.shape).copy_(x)
    assert copy.data_ptr() == begin + offset
    return copy


class GuardedMemory(TorchFunctionMode):
    """What torch allocates for a kernel is guarded, too."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        is_new = function in FACTORIES and made.device.type == "cpu" and made.numel()
        return guarded(made, self.at_end) if is_new else made


def conv_gradients(x: Tensor, taps: Tensor, before: int) -> Tensor:
    """Calls the kernels themselves: within operations of torch.library memory would not be guarded."""
    conv.input_gradient(x, taps, before, x.shape[1])
    return conv.softmax_gradient_(conv.tap_gradient(x, x, before, taps.shape), taps)


def problems() -> Iterator[Problem]:
    """Those of all tests, and more sizes around those of the innermost loops."""
    yield from every_problem()
    for width in (1, 31, 33, 97):
        for time, taps in ((1, 1), (1, 31), (33, 31), (70, 3)):
            for own in ((), (2, time)):
                inputs = [drawn(2, time, 2 * width), drawn(*own, 2, taps)]
                for before in (0, taps - 1):
                    name = f"{time} positions of {width} channels, {taps} taps, {before} before, {own}"
                    yield Problem("conv", name, inputs, lambda x, w, b=before: tap_conv(x, w, b, softmax=True), False)
                    yield Problem("conv", f"{name}, gradients", inputs, partial(conv_gradients, before=before), False)
        rows, weights = drawn(3, width), to_int8(drawn(5, width))
        yield Problem("linear", f"int8 of {width}", [rows], lambda x, w=weights: int8_linear(x, *w), False)
        yield Problem("linear", f"{width} channels", [rows, drawn(5, width)], few_rows_linear, False)
        order = torch.zeros(3, 1, dtype=torch.int64)
        lengths = torch.tensor([1, 2, 2])
        given = [drawn(3, 2, width), drawn(1, 2, 2, width), drawn(1, 2, 2, width)]
        run = lambda q, k, v, o=order, n=lengths: gathered_attention(q, k, v, o, n)  # noqa: E731
        yield Problem("gathered", f"{width} channels of two entries", given, run, False)
    for size in (1, 127, 128, 129, 9000):
        yield Problem("dropout", f"{size} values", [drawn(size)], lambda x: dropout(x, 0.3, True))
    for size in (2, 63, 64, 65, 200):
        for count in (1, size // 2, size - 1):
            entries, name = [drawn(3, size)], f"{count} of {size}"
            yield Problem("vocabulary", name, entries, lambda x, n=count: largest(x, n)[0], False)
            both = lambda x, n=count, size=size: normalised_largest(x.clone(), n, size - 1)[0]  # noqa: E731
            yield Problem("vocabulary", f"{name}, normalised", entries, both, False)
        yield Problem("vocabulary", f"sums of {size}", [drawn(3, size)], log_sum_exp, False)


def run(problem: Problem, value: float | None, at_end: bool) -> None:
    """Forward and, where there is one, backward; `value` takes the place of a third of every input's numbers."""
    inputs = [guarded(x.float(), at_end) for x in problem.inputs]
    if value is not None:
        for x in inputs:
            x.view(-1)[::3] = value
    differentiate = problem.differentiable and problem.operation != "conv"
    with GuardedMemory(at_end), torch.set_grad_enabled(differentiate):
        found = problem.run(*(x.requires_grad_(differentiate) for x in inputs))
        found = found if isinstance(found, tuple) else (found,)
        if differentiate:
            torch.stack([one.sum() for one in found]).sum().backward()


def main() -> None:
    for problem in problems():
        if problem.operation in OPERATIONS:
            for value in VALUES if problem.operation == "vocabulary" else VALUES[:2]:
                for at_end in (False, True):
                    print(problem, value, "at the end" if at_end else "at the beginning", flush=True)
                    run(problem, value, at_end)
    print("all stay within their memory")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
