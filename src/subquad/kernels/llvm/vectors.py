"""Vectors in LLVM: reading them, writing them and adding them up.

All functions but `fence` write code, with a builder of llvmlite, where they are called.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

ALIGNMENT = 32
"""Bytes at whose multiples streamed stores must begin."""

unsigned, index_type = np.uintp, types.uintp
"""Indices: signed and unsigned numbers together make floats in numba, so that constants have to be unsigned too."""
ONE, EIGHT, THIRTY_TWO, SIXTY_FOUR = (unsigned(number) for number in (1, 8, 32, 64))


def vector_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    """A pointer to `width` consecutive elements of an array's data, counted as if it had one axis."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(data.type.pointee, width).as_pointer())


def load(builder: Any, pointer: Any, element_bytes: int) -> Any:
    vector = builder.load(pointer)
    vector.align = element_bytes
    return vector


def prefetch(builder: Any, pointer: Any) -> None:
    """Tells the machine that the memory at a pointer will be read soon. The address may lie outside of the array."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    known = builder.module.globals.get("llvm.prefetch.p0i8")
    function = known or ir.Function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.bitcast(pointer, byte), number(0), number(3), number(1)])  # data, to read, to keep


def repeat(builder: Any, single: Any, width: int) -> Any:
    """A vector of `width` times the element of a vector of one."""
    first = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(single, ir.Constant(single.type, ir.Undefined), first)


def store(builder: Any, vector: Any, pointer: Any, element_bytes: int, streamed: Any) -> None:
    """Writes a vector; around the caches if `streamed`, for which its address must be a multiple of ALIGNMENT."""
    with builder.if_else(streamed) as (around, through):
        with around:
            write = builder.store(vector, pointer)
            write.align = min(ALIGNMENT, element_bytes * vector.type.count)
            write.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        with through:
            builder.store(vector, pointer).align = element_bytes


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the machine can."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def totals_of(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector's elements, as one vector. Counts and lengths are powers of two, counts the smaller."""
    count = len(vectors)
    while len(vectors) > 1:  # neighbours are added, the results of two vectors share one
        vectors = [add_neighbours(builder, *pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    (vector,) = vectors
    while vector.type.count > count:
        vector = add_neighbours(builder, vector, None)
    return vector


def add_neighbours(builder: Any, vector: Any, second: Any) -> Any:
    """Elements 0 and 1, 2 and 3, ... of a vector, and of a second one behind it unless that is None, added."""
    length = vector.type.count * (1 if second is None else 2)
    second = ir.Constant(vector.type, ir.Undefined) if second is None else second
    which = ir.VectorType(ir.IntType(32), length // 2)
    even, odd = (
        builder.shuffle_vector(vector, second, ir.Constant(which, list(range(first, length, 2)))) for first in (0, 1)
    )
    return builder.add(even, odd) if isinstance(vector.type.element, ir.IntType) else builder.fadd(even, odd)


@intrinsic
def fence(_: Any) -> Any:
    """Makes streamed stores visible to the other threads before the task counts as done."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
