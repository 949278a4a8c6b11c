"""CUDA graphs without CUDA: operations are recorded with their tensors, and done again in the same memory.

As with a real graph, nothing of Python runs again, and whatever a step should take from outside has to be in a tensor
that was there when it was recorded. What waits for a device, such as reading a number, is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}


class Recorder(TorchDispatchMode):
    """Keeps every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITING, f"a graph cannot wait, as {func} does"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and not _same_memory(old, new):
                    old.copy_(new)


def _same_memory(old: Tensor, new: Tensor) -> bool:
    """Whether a result is a view of an argument or the argument itself: then it is where it was."""
    return old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()


def record(run: Callable[[], None], undo: Callable[[], None]) -> Callable[[], None]:
    """In place of `record_cuda_graph`. Recording computes here, which is undone."""
    recorder = Recorder()
    with recorder:
        run()
    undo()

    def replay() -> None:
        with torch.no_grad():
            recorder.replay()

    return replay
