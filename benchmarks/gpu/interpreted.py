"""Loads, stores and products of Triton kernels as the interpreter makes them, held against `traffic/`.

To be used in a process with TRITON_INTERPRET=1 and SUBQUAD_KERNELS=gpu: kernels then run on small CPU tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from benchmarks.gpu.hardware import FLOAT32, FLOAT32_DOT, TENSOR
from benchmarks.gpu.traffic import CACHE, traffic_of
from benchmarks.gpu.triton_launches import Launch, intercept
from subquad.kernels import triton_tools

INPUT_PRECISIONS = {"tf32": FLOAT32, "ieee": FLOAT32_DOT}


class _Observed:
    """What the programs of one launch did."""

    def __init__(self) -> None:
        self.loaded = 0
        self.stored = 0
        self.dots: Counter[str] = Counter()
        self._addresses: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []

    def load(self, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[_as_bools(mask, pointers)].ravel()
        self._addresses.append(addresses)
        self._sizes.append(np.full(addresses.shape, _bytes(pointers)))

    def store(self, pointers: Any, mask: Any) -> None:
        self.stored += int(_as_bools(mask, pointers).sum()) * _bytes(pointers)

    def dot(self, dtype: Any, precision: str, left: Sequence[int], right: Sequence[int]) -> None:
        kind = TENSOR if dtype.primitive_bitwidth <= 16 else INPUT_PRECISIONS[precision]
        self.dots[kind] += 2 * prod(left) * right[-1]

    def end_program(self) -> None:
        if self._addresses:
            addresses, sizes = np.concatenate(self._addresses), np.concatenate(self._sizes)
            distinct = int(sizes[np.unique(addresses, return_index=True)[1]].sum())
            self.loaded += distinct if distinct <= CACHE else int(sizes.sum())
        self._addresses, self._sizes = [], []


def _as_bools(mask: Any, pointers: Any) -> np.ndarray:
    """The interpreter makes integers of a mask and a scalar condition."""
    return np.broadcast_to(mask.data, pointers.data.shape).astype(bool)


def _bytes(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


@contextmanager
def checked_traffic() -> Iterator[list[str]]:
    """AssertionError in it: a launch does not move or multiply what `traffic/` says. Yields the kernels that ran."""
    ran: list[str] = []

    def check(launch: Launch, run: Callable[[], Any]) -> Any:
        observed = _Observed()
        with _observing(observed):
            result = run()
        observed.end_program()
        said = traffic_of(launch)
        context = f"{launch.kernel} on {launch.grid}"
        assert said.loaded == observed.loaded, f"{context} loads {observed.loaded} bytes, not {said.loaded}"
        assert said.stored == observed.stored, f"{context} stores {observed.stored} bytes, not {said.stored}"
        dots = {kind: flops for kind, flops in said.dots.items() if flops}
        assert dots == dict(observed.dots), f"{context} multiplies {dict(observed.dots)}, not {dots}"
        ran.append(launch.kernel)
        return result

    with intercept(check):
        yield ran


@contextmanager
def _observing(observed: _Observed) -> Iterator[None]:
    """Calls of the interpreter tell `observed` first.

    `triton_tools.dot` multiplies float32 in the interpreter whatever it is given, so it is observed as a whole.
    """
    within_dot: list[bool] = []
    call = InterpretedFunction.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    dot, start = InterpreterBuilder.create_dot, InterpreterBuilder.set_grid_idx

    def observed_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        observed.load(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def observed_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        observed.store(pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    def observed_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any, **options: Any) -> Any:
        if not within_dot:
            observed.dot(a.dtype, precision.name.lower(), a.data.shape, b.data.shape)
        return dot(self, a, b, d, precision, *rest, **options)

    def observed_call(function: Any, *args: Any, **options: Any) -> Any:
        if function.fn.__module__ != triton_tools.__name__ or function.fn.__name__ != "dot":
            return call(function, *args, **options)
        a, b, precision = (*args, *options.values())
        observed.dot(a.dtype, getattr(precision, "value", precision), a.shape, b.shape)
        within_dot.append(True)
        try:
            return call(function, *args, **options)
        finally:
            within_dot.pop()

    def observed_start(self: Any, *place: int) -> None:
        observed.end_program()
        start(self, *place)

    with ExitStack() as stack:
        for owner, name, function in (
            (InterpreterBuilder, "create_masked_load", observed_load),
            (InterpreterBuilder, "create_masked_store", observed_store),
            (InterpreterBuilder, "create_dot", observed_dot),
            (InterpreterBuilder, "set_grid_idx", observed_start),
            (InterpretedFunction, "__call__", observed_call),
        ):
            stack.enter_context(patch.object(owner, name, function))
        yield
