"""Which implementation of a fused operation runs: plain torch, numba on the CPU, or Triton on the GPU.

The environment variable SUBQUAD_KERNELS decides, each time an operation runs:

    auto (default)   gpu for CUDA tensors, cpu for CPU tensors, reference for what is left or cannot be imported
    reference        plain torch, the definition of every operation
    cpu, gpu         that one or an error

What torch.export traces is the reference, so that an exported graph runs without this package.
"""

import importlib
import os
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from subquad.kernels import tracing

Kernels = Literal["cpu", "gpu"]
Implementation = Literal["reference"] | Kernels
VARIABLE = "SUBQUAD_KERNELS"

_INSTALL = {
    "cpu": ("numba", "pip install numba"),
    "gpu": ("triton", "pip install 'subquad[gpu]' (Linux; torch for CUDA brings it along)"),
}


def chosen(x: Tensor) -> Implementation:
    """The implementation for an operation on tensors where x is."""
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted == "reference" or tracing.is_exporting():
        return "reference"
    if wanted == "auto":
        if x.device.type == "cpu":
            return "cpu" if _reason("cpu") is None else "reference"
        return "gpu" if x.device.type == "cuda" and _reason("gpu") is None else "reference"
    if wanted not in _INSTALL:
        raise ValueError(f"{VARIABLE}={wanted} is unknown; it takes auto, reference, cpu or gpu")
    forced: Kernels = "cpu" if wanted == "cpu" else "gpu"
    _demand(forced, x)
    return forced


@tracing.constant_when_compiled
def reference_forced() -> bool:
    """Whether the user wants plain torch everywhere; for operations whose fast form is made of torch's own products."""
    return os.environ.get(VARIABLE) == "reference"


def fuses_on_cpu(x: Tensor) -> bool:
    """Whether fused operations made of torch's own products serve x: full precision, on the CPU, and not in exports."""
    if tracing.is_exporting() or x.device.type != "cpu":
        return False
    return x.dtype in (torch.float32, torch.float64) and not reference_forced()


@tracing.constant_when_compiled
def triton_serves(device: str) -> bool:
    """Whether Triton kernels run for tensors on a kind of device ("cuda", "cpu"), also asked by compiled code."""
    wanted = os.environ.get(VARIABLE) or "auto"
    interpreted = wanted == "gpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if tracing.is_exporting():
        return False
    return wanted in ("auto", "gpu") and (device == "cuda" or interpreted) and _reason("gpu") is None


def problems() -> list[str]:
    """What keeps this process from its fastest kernels, one line each, for `subquad doctor`."""
    useful: list[Kernels] = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    return [f"{reason}; plain torch is used instead" for kind in useful if (reason := _reason(kind)) is not None]


def _demand(wanted: Kernels, x: Tensor) -> None:
    """ValueError unless the implementation that the user insists on can work on x."""
    reason = _reason(wanted)
    if reason is not None:
        raise ValueError(f"{VARIABLE}={wanted}, but {reason}")
    # Triton's interpreter works on CPU tensors: the tests of machines without a GPU use it
    interpreted = wanted == "gpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if x.device.type != {"cpu": "cpu", "gpu": "cuda"}[wanted] and not interpreted:
        raise ValueError(f"{VARIABLE}={wanted} cannot work on a tensor on {x.device}; leave {VARIABLE} at auto")


# ---------------------------------------------------------------------- what this process can run


def _reason(kind: Kernels) -> str | None:
    """Why an implementation cannot run; None when it can."""
    if kind == "cpu" and _forked:
        return (
            "this process was forked from one that had run numba's threads, which do not survive a fork (start "
            "workers with the 'spawn' method)"
        )
    return _missing(*_INSTALL[kind])


@cache
def _missing(package: str, remedy: str) -> str | None:
    """Imports a package, once; says what is wrong with it, if anything."""
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken installation fails in ways of its own: OSError, AttributeError, ...
        return f"{package} cannot be imported ({type(error).__name__}: {error}): {remedy}"
    return None


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


@cache
def unsafe_to_fork() -> None:
    """Tells that threads run now that end any forked process which uses them: forks then take the reference."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
