"""Triton's interpreter does the same in about half of the time.

It looks through its whole language for functions to replace whenever a function of a kernel calls another one, though
the launch of the kernel has replaced them. And it computes with tensors of its own what a sum of integers would be in
64 bits, to see whether it overflows.
"""

import inspect
import operator
from typing import Any

import numpy as np

OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def take_shortcuts() -> None:
    """For this process, which imports triton with TRITON_INTERPRET=1."""
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    languages = (language, language.core)

    def replace_once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value) and value in languages]
        if modules and all(module.static_print is print for module in modules):  # as it is when they are replaced
            return interpreter._LangPatchScope()
        return replace(function)

    def refuse_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64:
            return
        exact = OPERATORS[operation.__name__](*(one.handle.data.astype(np.int64) for one in (lhs, rhs)))
        assert np.all((exact >= kind.get_int_min_value()) & (exact <= kind.get_int_max_value())), (
            f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
        )

    interpreter._patch_lang = replace_once
    TritonSemantic.binary_op_sanitize_overflow_impl = refuse_overflow
