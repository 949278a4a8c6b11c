"""What torch.compile and torch.export need the code to know: this is the only module that asks torch about them.

Both run a function once and record its operations as a graph, which then serves other inputs. torch.compile makes a new
graph when a branch would go the other way. torch.export makes one graph for good, in which sizes can be left open, and
which has to run without this package.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., object])


def is_tracing() -> bool:
    """Whether operations are recorded by torch.compile or torch.export."""
    return torch.compiler.is_compiling()


def is_exporting() -> bool:
    """Whether operations are recorded by torch.export."""
    return torch.compiler.is_exporting()


def is_symbolic(size: int) -> bool:
    """Whether an export leaves a size open: its graph serves every size from 1 on and cannot branch on it."""
    return is_exporting() and not isinstance(size, int)


def may_branch_on_length() -> bool:
    """Whether code may do something special for some lengths. While tracing, each case would cost another graph."""
    return not is_tracing()


def may_read_values(x: Tensor) -> bool:
    """Whether code may look at the numbers in a tensor. A graph cannot, and a tensor on the meta device has none."""
    return not is_tracing() and not x.is_meta


def may_call_directly(*tensors: Tensor) -> bool:
    """Whether a kernel may be called without the `torch.library` operation around it.

    Calling the operation takes as long as a small kernel does. It is needed where somebody differentiates or compiles,
    and for subclasses of tensors. On the meta device it tells its shape and its FLOPs at once, where plain torch would
    go through all of its steps. An exported graph must not contain the operation.
    """
    if is_exporting():
        return True
    if is_tracing() or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
        return False
    return all(type(one) in (Tensor, nn.Parameter) and not one.is_meta for one in tensors)


def constant_when_compiled(function: Function) -> Function:
    """Marks a function whose result torch.compile takes as a constant of the graph. Its arguments must be constants.

    This does what torch.compiler.assume_constant_result does, but without importing the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
