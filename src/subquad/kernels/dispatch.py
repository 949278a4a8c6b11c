"""Which implementation of an operation runs: plain torch, one for the CPU, or one for the GPU.

Every folder beside this file that has a `reference.py` is an operation. Its `cpu.py` and `gpu.py`, where there are any,
offer the same functions: to add a kernel is to add such a file. The public function of an operation asks `choose` every
time it is called, and the environment variable SUBQUAD_KERNELS decides:

    auto (default)   gpu for CUDA tensors and cpu for CPU tensors; reference for what is left: other devices, precisions
                     and cases that the kernel does not take, a kernel that is not there or cannot be imported
    reference        plain torch, the definition of every operation
    cpu, gpu         that one or an error

An operation that has only a reference runs it under each of these. What torch.export traces is the reference, so that
an exported graph runs without this package; and so is what torch.func transforms.

A `cpu.py` or `gpu.py` may define

    DTYPES                the precisions that it takes; without it, all of FLOATING
    LACKS                 names of the cases that it does not take, as the operation's public function spells them
    why_unavailable()     why it cannot run in this process, None if it can
"""

import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import tracing

VARIABLE = "SUBQUAD_KERNELS"
DEVICES: dict[str, str] = {"cpu": "cpu", "gpu": "cuda"}
SETTINGS = ("auto", "reference", *DEVICES)
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
REMEDIES: dict[str, str] = {
    "cpu": "pip install numba",
    "gpu": "pip install 'subquad[gpu]' (Linux; torch for CUDA brings it along)",
}

_modules = SimpleNamespace()
"""Implementations that have been chosen, under names such as conv_cpu. Attributes, and no dict: torch.compile copies a
dict when it first looks at it, and would not find what a second operation of the same graph chose after that."""


def choose(operation: str, x: Tensor, *needs: str) -> Any:
    """The module that works on tensors like x, in device and precision; needs: special cases it has to be able to do.

    ValueError: the variable has no known value, or asks for an implementation that cannot do this.
    """
    return getattr(_modules, _name(operation, x.device.type, x.dtype, *needs))


def implementation(operation: str, x: Tensor, *needs: str) -> str:
    """The name of what `choose` returns: reference, cpu or gpu."""
    return _name(operation, x.device.type, x.dtype, *needs).rpartition("_")[2]


def has_kernel(operation: str, x: Tensor) -> bool:
    """Whether `choose` takes something else than the reference for tensors like x; False also where it refuses."""
    try:
        return implementation(operation, x) != "reference"
    except ValueError:
        return False


def check(name: str, device: torch.device) -> None:
    """ValueError if the variable has no known value, or asks for kernels that cannot work on tensors of a device.

    Mechanisms ask this, so that those which need no operation of this folder refuse what the others refuse. name: that
    of who asks.
    """
    _check(name, device.type)


def operations() -> list[str]:
    """The names of all operations."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/reference.py"))


def problems() -> list[str]:
    """What keeps this process from its fastest kernels, one line each, for `subquad doctor`."""
    kinds: list[str] = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    found: dict[str, list[str]] = {}
    for kind in kinds:
        for operation in operations():
            if _exists(operation, kind) and (reason := _why_unavailable(operation, kind)) is not None:
                found.setdefault(reason, []).append(operation)
    return [f"{', '.join(names)}: {reason}; plain torch is used instead" for reason, names in found.items()]


def forget() -> None:
    """Lets the next call of each operation choose anew, after something that `why_unavailable` depends on changed."""
    _decide.cache_clear()


# ---------------------------------------------------------------------- the choice


@tracing.constant_when_compiled
def _name(operation: str, device: str, dtype: torch.dtype, *needs: str) -> str:
    setting = _setting(operation)
    if tracing.is_exporting() or tracing.is_transformed():
        setting = "reference"
    return _decide(operation, setting, _interprets(setting), device, dtype, needs)


@tracing.constant_when_compiled
def _check(name: str, device: str) -> None:
    setting = _setting(name)
    if setting in DEVICES:
        _check_device(name, setting, _interprets(setting), device)


def _setting(name: str) -> str:
    setting = os.environ.get(VARIABLE) or "auto"
    if setting not in SETTINGS:
        raise ValueError(f"{name}: {VARIABLE}={setting} is unknown; it takes auto, reference, cpu or gpu")
    return setting


def _interprets(setting: str) -> bool:
    """Whether Triton's interpreter runs GPU kernels on CPU tensors, as tests do on machines without a GPU."""
    return setting == "gpu" and os.environ.get("TRITON_INTERPRET") == "1"


def _check_device(name: str, kind: str, interprets: bool, device: str) -> None:
    if not interprets and DEVICES[kind] != device:
        raise ValueError(f"{name}: {VARIABLE}={kind} cannot work on a tensor on {device}; set {VARIABLE}=auto")


@cache
def _decide(
    operation: str, setting: str, interprets: bool, device: str, dtype: torch.dtype, needs: tuple[str, ...]
) -> str:
    """The name of the module, which is imported then. Every call of an operation asks, hence the cache."""
    chosen = "reference"
    for kind, kind_device in DEVICES.items():
        if setting == "auto" and device == kind_device and _why_not(operation, kind, dtype, needs) is None:
            chosen = kind
        if setting == kind:
            _check_device(operation, kind, interprets, device)
            if not any(_exists(operation, other) for other in DEVICES):
                continue
            reason = _why_not(operation, kind, dtype, needs)
            if reason is not None:
                remedy = f"set {VARIABLE}=auto to take the fastest that is there"
                raise ValueError(f"{operation}: {VARIABLE}={kind} is not possible: {reason}; {remedy}")
            chosen = kind
    name = f"{operation}_{chosen}"
    setattr(_modules, name, importlib.import_module(f"subquad.kernels.{operation}.{chosen}"))
    return name


# ---------------------------------------------------------------------- what there is


def _why_not(operation: str, kind: str, dtype: torch.dtype, needs: tuple[str, ...]) -> str | None:
    """Why an implementation does not serve a call; None when it does."""
    if not _exists(operation, kind):
        return f"it has no {kind} kernel"
    reason = _why_unavailable(operation, kind)
    if reason is not None:
        return reason
    module = _import(operation, kind)
    if dtype not in getattr(module, "DTYPES", FLOATING):
        return f"its {kind} kernel does not take {dtype}"
    lacking = [need for need in needs if need in getattr(module, "LACKS", ())]
    return f"its {kind} kernel does not take {', '.join(lacking)}" if lacking else None


def _exists(operation: str, kind: str) -> bool:
    return importlib.util.find_spec(f"subquad.kernels.{operation}.{kind}") is not None


def _why_unavailable(operation: str, kind: str) -> str | None:
    module = _import(operation, kind)
    if isinstance(module, str):
        return module
    return module.why_unavailable() if hasattr(module, "why_unavailable") else None


@cache
def _import(operation: str, kind: str) -> ModuleType | str:
    """The module, or why it cannot be imported."""
    try:
        return importlib.import_module(f"subquad.kernels.{operation}.{kind}")
    except Exception as error:  # a broken installation fails in ways of its own: OSError, AttributeError, ...
        return f"the {kind} kernel cannot be imported ({type(error).__name__}: {error}): {REMEDIES[kind]}"
