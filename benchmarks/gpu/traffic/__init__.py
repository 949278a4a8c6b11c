"""Bytes and FLOPs of every Triton kernel of subquad: one function for each, one file for each operation.

A function gets a `Launch` and returns its `Traffic`. `conv.py` is the model. What counts:

- bytes that a program loads or stores; elements that a mask turns off move nothing. What several programs load counts
  once for each of them, although the GPU's second-level cache may serve them.
- what one program loads twice counts once, while all that it loads fits a first-level cache (`loaded`).
- FLOPs of `tl.dot` by kind (`hardware.py`), of whole tiles, as the tensor cores compute them; multiply-adds outside of
  `tl.dot` where they are many.

`tests/benchmarks/test_gpu_traffic.py` runs kernels in Triton's interpreter and compares bytes and FLOPs of `tl.dot`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import triton.language as tl

from benchmarks.gpu.hardware import FLOAT32, FLOAT32_DOT, TENSOR
from benchmarks.gpu.triton_launches import Launch

CACHE = 64 * 1024
"""Bytes of the first-level cache that one program can count on, when three of them share a multiprocessor."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and FLOPs of one launch, all programs together. dots: FLOPs of `tl.dot` by kind; flops: of all else."""

    loaded: int
    stored: int
    dots: Mapping[str, int] = field(default_factory=dict)
    flops: int = 0


Function = Callable[[Launch], Traffic]
_functions: dict[str, Function] = {}


def traffic(kernel: str) -> Callable[[Function], Function]:
    """Registers a function for a kernel such as conv._convolve."""

    def register(function: Function) -> Function:
        assert kernel not in _functions, kernel
        _functions[kernel] = function
        return function

    return register


def traffic_of(launch: Launch) -> Traffic:
    """Bytes and FLOPs of a launch. NotImplementedError: its kernel has no function here."""
    if not _functions:
        for module in pkgutil.iter_modules(__path__):
            importlib.import_module(f"{__name__}.{module.name}")
    if launch.kernel not in _functions:
        raise NotImplementedError(f"{launch.kernel} has no function in benchmarks/gpu/traffic/")
    return _functions[launch.kernel](launch)


def loaded(distinct: int, requested: int) -> int:
    """What a program loads from beyond its cache. distinct: bytes at different addresses; requested: all its loads."""
    return distinct if distinct <= CACHE else requested


def dot_kind(arguments: SimpleNamespace) -> str:
    """The kind of products whose factors are given by FACTOR and PRECISION, from `triton_tools.factors`."""
    if tl.float32 != arguments.FACTOR:
        return TENSOR
    return FLOAT32_DOT if arguments.PRECISION == "ieee" else FLOAT32


def blocks(length: int, size: int) -> list[int]:
    """How many of `length` positions lie in each block of `size`: all full but perhaps the last."""
    return [min(size, length - start) for start in range(0, length, size)]
