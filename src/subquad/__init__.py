"""subquad: sequence mixing that costs less than the square of the length, behind one contract."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ELSEWHERE = {"swap": "subquad.interop.patching"}
"""Names that are loaded when they are asked for: the command line and the core must start without them."""


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)
