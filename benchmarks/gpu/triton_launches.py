"""Triton kernels as they are launched: which one, on which grid, with which arguments."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.runtime.jit import KernelInterface


@dataclass(frozen=True)
class Launch:
    """kernel: such as conv._convolve, the folder in `subquad.kernels` and the function's name.

    arguments: under the names that the kernel gives them, constants too.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: SimpleNamespace

    @property
    def programs(self) -> int:
        programs = 1
        for side in self.grid:
            programs *= side
        return programs


@contextmanager
def intercept(handle: Callable[[Launch, Callable[[], Any]], Any]) -> Iterator[None]:
    """Calls handle(launch, run) in the place of every launch; run() is what would have happened."""

    def subscript(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            # options such as num_warps are the compiler's, not the kernel's
            named = {name: value for name, value in options.items() if name in kernel.arg_names}
            bound = inspect.signature(kernel.fn).bind(*args, **named)
            bound.apply_defaults()
            arguments = SimpleNamespace(**bound.arguments)
            sides = grid(bound.arguments) if callable(grid) else grid
            module = kernel.fn.__module__.split(".")
            name = f"{module[-2]}.{kernel.fn.__name__}"
            return handle(
                Launch(name, tuple(sides), arguments), lambda: kernel.run(*args, grid=grid, warmup=False, **options)
            )

        return launch

    with patch.object(KernelInterface, "__getitem__", subscript):
        yield
