"""subquad: sequence mixing that costs less than the square of the length, behind one contract."""

import sys
from importlib import import_module
from inspect import Signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subquad.api import advise, compare, dry_run, evaluate, linearise, load_run, study, train
    from subquad.interop.patching import load_swapped, register_attention, swap
    from subquad.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "advise", "compare", "dry_run", "evaluate"]
__all__ += ["linearise", "load_run", "load_swapped", "register_attention", "study", "swap", "train"]

_LAZY = {
    "Run": "subquad.run",
    "advise": "subquad.api",
    "dry_run": "subquad.api",
    "load_run": "subquad.api",
    "load_swapped": "subquad.interop.patching",
    "register_attention": "subquad.interop.patching",
    "study": "subquad.api",
    "swap": "subquad.interop.patching",
}
"""The module of each name. It is imported when the name is first used, so that `import subquad` imports no torch."""
_FUNCTIONS_AND_FOLDERS = ("compare", "evaluate", "linearise", "train")
"""`subquad.train` is a function of `subquad.api`, and a folder of modules. See `_CallableFolder`."""


class _CallableFolder(ModuleType):
    """A package that can be called: `subquad.train(...)` calls `subquad.api.train`.

    Python makes every imported package an attribute of the one around it, so `subquad.train` is the folder whatever
    stands here; this class makes it the function as well.
    """

    def _function(self) -> Any:
        return getattr(import_module("subquad.api"), self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function()(*arguments, **options)

    @property
    def __signature__(self) -> Signature:
        return Signature.from_callable(self._function())


class _Subquad(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS_AND_FOLDERS and type(value) is ModuleType:
            value.__class__ = _CallableFolder
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTIONS_AND_FOLDERS:
            return import_module(f"{__name__}.{name}")
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Subquad
