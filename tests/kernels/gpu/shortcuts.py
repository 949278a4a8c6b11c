"""Triton's interpreter does the same in less than half of the time, and rounds to bfloat16 as a GPU does.

It looks through its whole language for functions to replace whenever a function of a kernel calls another one, though
the launch of the kernel has replaced them. And it computes with tensors of its own what a sum of integers would be in
64 bits, to see whether it overflows. And for every value of a kernel it makes anew what depends on its type alone.
Numbers of float32 it cuts off to bfloat16, bit by bit, where a GPU rounds to the nearest.
"""

import functools
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
    _make_types_once(interpreter, language.core)
    _round_to_bfloat16(interpreter, language)


def _make_types_once(interpreter: Any, core: Any) -> None:
    """Types of blocks, shapes of tensors and numpy's types are made when they are first met. Nothing changes them."""
    new_type, new_tensor, find_numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    find_numpy_type_once = functools.cache(find_numpy_type)  # of scalars, which are equal if their names are
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            new_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def numpy_type(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        return find_numpy_type(scalar) if scalar.is_ptr() else find_numpy_type_once(scalar)

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
    interpreter._get_np_dtype = numpy_type


def _round_to_bfloat16(interpreter: Any, language: Any) -> None:
    """Between float32 and bfloat16, whose bits are the upper half of float32's, kept as whole numbers of 16 bits."""
    convert = interpreter._convert_float

    def convert_float(numbers: Any, given: Any, wanted: Any, rounding_mode: Any) -> Any:
        if (given, wanted) == (language.bfloat16, language.float32):
            return numbers.view(np.uint16).astype(np.uint32) << 16
        if (given, wanted) != (language.float32, language.bfloat16):
            return convert(numbers, given, wanted, rounding_mode)
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # halves go to the even neighbour
        return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16).reshape(numbers.shape)

    interpreter._convert_float = convert_float
