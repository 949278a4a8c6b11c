"""What the CPU kernels are made of: numba with torch's threads and a cache on disk, and loops in vector types.

numba vectorises loops only with luck. Innermost loops are therefore intrinsics that write LLVM code themselves, on
vectors as long as a loop is wide; LLVM maps them to whatever registers the machine has.

The cache on disk notices edits of a kernel's own file, not of this one: after one, remove kernels/__pycache__/*.nbi.
"""

import importlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from subquad.kernels import dispatch

ALIGNMENT = 32
"""Bytes at whose multiples streamed stores must begin."""

settings: Any = numba.config

unsigned, index_type = np.uintp, types.uintp
"""Indices: signed and unsigned numbers together make floats in numba, so that constants have to be unsigned too."""
ONE, EIGHT, THIRTY_TWO, SIXTY_FOUR = (unsigned(number) for number in (1, 8, 32, 64))

# ---------------------------------------------------------------------- compiling and running


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles when first called, for each precision; what was compiled is kept on disk.

    Products may be fused with sums. Nothing more: numba would apply it to the vector code as well, which relies on the
    order of its operations. Other threads of Python go on meanwhile.
    """
    options: Any = {"parallel": True, "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # neither the folder of this file nor the user's cache folder can be written
        return numba.njit(function, **options)


def plain(x: Tensor) -> Tensor:
    """Contiguous, and in a precision that numba knows."""
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).contiguous()


def view(x: Tensor) -> np.ndarray:
    return (x.detach() if x.requires_grad else x).numpy()


def run(kernel: Callable[..., None], *args: Any) -> None:
    """With as many threads as torch uses, without changing how many the caller's own numba code gets."""
    with _turn:
        callers, own = numba.get_num_threads(), min(torch.get_num_threads(), settings.NUMBA_NUM_THREADS)
        if callers == own:  # setting takes as long as a small kernel
            kernel(*args)
            return
        numba.set_num_threads(own)
        try:
            kernel(*args)
        finally:
            numba.set_num_threads(callers)


def _start_threads() -> AbstractContextManager[Any]:
    """Starts numba's threads: those of OpenMP, unless the user chose others, so that torch's loops and numba's take
    turns on the same ones. Returns what a kernel has to hold while it runs."""
    if settings.THREADING_LAYER == "default" and _importable("numba.np.ufunc.omppool"):
        settings.THREADING_LAYER = "omp"
    torch_threads = torch.get_num_threads()
    numba.get_num_threads()  # starts them, and with OpenMP sets the number of torch's threads too
    torch.set_num_threads(torch_threads)
    if numba.threading_layer() == "omp":
        _notice_forks()
    # numba's own pool ends the process when two threads of Python enter it at once
    return threading.Lock() if numba.threading_layer() == "workqueue" else nullcontext()


_forked = False


def why_unavailable() -> str | None:
    """Why kernels compiled by numba cannot run in this process; None when they can."""
    if not _forked:
        return None
    return (
        "this process was forked from one that had run numba's threads, which do not survive a fork (start workers "
        "with the 'spawn' method)"
    )


def _notice_forks() -> None:
    """A forked process that uses the threads of OpenMP ends: from now on forks know that they must not."""

    def note() -> None:
        global _forked
        _forked = True
        dispatch.forget()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=note)


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


_turn = _start_threads()

# ---------------------------------------------------------------------- vectors in LLVM


def vector_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    """A pointer to `width` consecutive elements of an array's data, counted as if it had one axis."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(data.type.pointee, width).as_pointer())


def load(builder: Any, pointer: Any, element_bytes: int) -> Any:
    vector = builder.load(pointer)
    vector.align = element_bytes
    return vector


def prefetch(builder: Any, pointer: Any) -> None:
    """Asks for what a pointer shows to, which need not exist, to be read soon."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    known = builder.module.globals.get("llvm.prefetch.p0i8")
    function = known or ir.Function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.bitcast(pointer, byte), number(0), number(3), number(1)])  # data, to read, to keep


def repeat(builder: Any, single: Any, width: int) -> Any:
    """A vector of `width` times the element of a vector of one."""
    first = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(single, ir.Constant(single.type, ir.Undefined), first)


def store(builder: Any, vector: Any, pointer: Any, element_bytes: int, streamed: Any) -> None:
    """Writes a vector; around the caches if `streamed`, for which its address must be a multiple of ALIGNMENT."""
    with builder.if_else(streamed) as (around, through):
        with around:
            write = builder.store(vector, pointer)
            write.align = min(ALIGNMENT, element_bytes * vector.type.count)
            write.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        with through:
            builder.store(vector, pointer).align = element_bytes


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the machine can."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def totals_of(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector's elements, as one vector. Counts and lengths are powers of two, counts the smaller."""
    count = len(vectors)
    while len(vectors) > 1:  # neighbours are added, the results of two vectors share one
        vectors = [add_neighbours(builder, *pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    (vector,) = vectors
    while vector.type.count > count:
        vector = add_neighbours(builder, vector, None)
    return vector


def add_neighbours(builder: Any, vector: Any, second: Any) -> Any:
    """Elements 0 and 1, 2 and 3, ... of a vector, and of a second one behind it unless that is None, added."""
    length = vector.type.count * (1 if second is None else 2)
    second = ir.Constant(vector.type, ir.Undefined) if second is None else second
    which = ir.VectorType(ir.IntType(32), length // 2)
    even, odd = (
        builder.shuffle_vector(vector, second, ir.Constant(which, list(range(first, length, 2)))) for first in (0, 1)
    )
    return builder.add(even, odd) if isinstance(vector.type.element, ir.IntType) else builder.fadd(even, odd)


@intrinsic
def fence(_: Any) -> Any:
    """Makes streamed stores visible to the other threads before the task counts as done."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
