"""What torch.compile, torch.export and torch.func need the code to know: only this module asks torch about them.

Both run a function once and record its operations as a graph, which then serves other inputs. torch.compile makes a new
graph when a branch would go the other way. torch.export makes one graph for good, in which sizes can be left open, and
which has to run without this package.

The transformations of torch.func (grad, vmap, jvp, ...) and forward-mode differentiation go through plain torch, for a
kernel has no rules for them: `dispatch.choose` then takes the reference. A backward pass that is differentiated itself
(create_graph=True) takes the gradients of the reference, too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., object])


def constant_when_compiled(function: Function) -> Function:
    """Marks a function whose result torch.compile takes as a constant of the graph. Its arguments must be constants.

    This does what torch.compiler.assume_constant_result does, but without importing the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_tracing() -> bool:
    """Whether operations are recorded by torch.compile or torch.export."""
    return torch.compiler.is_compiling()


def uncompiled() -> AbstractContextManager[None]:
    """Within the block, what was given to torch.compile runs as it is written."""
    return torch.compiler.set_stance("force_eager")


def is_exporting() -> bool:
    """Whether operations are recorded by torch.export."""
    return torch.compiler.is_exporting()


@constant_when_compiled
def is_transformed() -> bool:
    """Whether operations run under a transformation of torch.func, or under forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiates_backward() -> bool:
    """In a backward pass: whether it will be differentiated as well, so that kernels of gradients cannot serve."""
    return torch.is_grad_enabled() and not is_tracing()


def gradients_of(
    reference: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    *grads: Tensor,
) -> list[Tensor | None]:
    """The gradients of the tensors of reference(*inputs), which can be differentiated again; None for constants."""
    with torch.enable_grad():
        # views: of two inputs one may depend on the other, and each gets the gradient of its own place alone
        own = [None if one is None else one.view_as(one) for one in inputs]
        learned = [one for one in own if one is not None and one.requires_grad]
        outputs = reference(*own)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        found = torch.autograd.grad(outputs, learned, grads, create_graph=True, allow_unused=True)
    rest = iter(found)
    return [next(rest) if one is not None and one.requires_grad else None for one in inputs]


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
    go through all of its steps. An exported graph must not contain the operation, and a transformation of torch.func
    has no rules for it.
    """
    if is_exporting() or is_transformed():
        return True
    if is_tracing() or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
        return False
    return all(type(one) in (Tensor, nn.Parameter) and not one.is_meta for one in tensors)
