"""Modules and tensors on a CUDA device that is not there: they carry shapes, types and strides, and no numbers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tools import cuda_guard

DEVICE = torch.device("cuda", 0)
Module = TypeVar("Module", bound=nn.Module)
_tensor = torch.tensor


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Within it torch makes fake tensors, and believes in a CUDA device where it asks in Python.

    The process keeps a CUDA guard that does nothing (`tools/cuda_guard`): one that works with a real device must not
    enter this.
    """
    cuda_guard.load()
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "is_available", lambda: True),  # else autocast turns itself off
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.cuda, "device_of", lambda _: nullcontext()),
            (torch, "tensor", _fake_tensor),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(FakeTensorMode())
        yield


def move_to_fake_cuda(module: Module) -> Module:
    """Replaces parameters and buffers by fake ones, in place; shared ones stay shared. To be called in `fake_cuda`."""
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for kind in (part._parameters, part._buffers):
            for name, old in kind.items():
                if old is None:
                    continue
                if id(old) not in moved:
                    new = torch.empty(old.shape, dtype=old.dtype, device=DEVICE)
                    moved[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                kind[name] = moved[id(old)]  # type: ignore[assignment]
    return module


def _fake_tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    """torch.tensor for a GPU copies from the CPU, which needs a real one."""
    made = _tensor(data, *args, **options)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)
