"""What CPU kernels compiled by numba share: torch's threads, a cache on disk, and tensors as arrays.

Their innermost loops are in `llvm/`. The cache on disk notices edits of a kernel's own file, not of `llvm/`: after one,
remove the files __pycache__/*.nbi of the operations' folders.
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
from torch import Tensor

from subquad.kernels import dispatch

settings: Any = numba.config

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
