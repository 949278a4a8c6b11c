"""Random bits by counting: Philox4x32 with 7 rounds, as in Random123 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011).

A block of four 32-bit numbers is a function of its number and a seed alone, so that any part of a sequence is made
without the parts before it, on any thread, and again in the backward pass.
"""

# ruff: noqa: ARG001 (numba gives an intrinsic the types of its operands, of which most are known)

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subquad.kernels.llvm.vectors import index_type, load, repeat, vector_at

LANES = 16
"""Blocks that are made at once."""
DRAWS = LANES * 4 * 2
"""Numbers of 16 bits in them."""
ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def philox(builder: Any, number: Any, seed: Any) -> list[Any]:
    """Blocks number * LANES .. number * LANES + LANES - 1: four vectors of 32-bit numbers. number, seed: 64 bits."""
    vector, wide = ir.VectorType(INT32, LANES), ir.VectorType(INT64, LANES)

    def constant(values: list[int]) -> Any:
        return ir.Constant(vector, values)

    def spread(value: Any) -> Any:
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), builder.trunc(value, INT32), INT32(0))
        return builder.shuffle_vector(one, one, constant([0] * LANES))

    def multiply(x: Any, by: int) -> tuple[Any, Any]:
        product = builder.mul(builder.zext(x, wide), ir.Constant(wide, [by] * LANES))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, [32] * LANES)), vector), builder.trunc(
            product, vector
        )

    first = builder.mul(number, INT64(LANES))
    counter = [
        builder.add(spread(first), constant(list(range(LANES)))),
        spread(builder.lshr(first, INT64(32))),
        constant([0] * LANES),
        constant([0] * LANES),
    ]
    keys = [spread(seed), spread(builder.lshr(seed, INT64(32)))]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = multiply(counter[0], MULTIPLIERS[0]), multiply(counter[2], MULTIPLIERS[1])
        counter = [
            builder.xor(builder.xor(high1, counter[1]), keys[0]),
            low1,
            builder.xor(builder.xor(high0, counter[3]), keys[1]),
            low0,
        ]
        keys = [
            builder.add(key, constant([increment] * LANES)) for key, increment in zip(keys, INCREMENTS, strict=True)
        ]
    return counter


def dropping() -> Callable[..., None]:
    """y[at + i] = x[at + i] * (scales[0] if draw i is at least `dropped`, else 0), i < DRAWS.

    The draws are 16 bits each, of the blocks of this number under this seed.
    """

    @intrinsic
    def drop(_: Any, y: Any, x: Any, at: Any, number: Any, seed: Any, dropped: Any, scales: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, x, at, number, seed, dropped, scales = args
            y_type, x_type, *_, scales_type = signature.args
            size, width = x_type.dtype.bitwidth // 8, 2 * LANES
            scale = repeat(
                builder, load(builder, vector_at(context, builder, scales_type, scales, at.type(0), 1), size), width
            )
            nothing = ir.Constant(scale.type, [0.0] * width)
            short = ir.VectorType(INT16, width)
            limit = builder.insert_element(ir.Constant(short, ir.Undefined), builder.trunc(dropped, INT16), INT32(0))
            limit = builder.shuffle_vector(limit, limit, ir.Constant(ir.VectorType(INT32, width), [0] * width))
            for part, bits in enumerate(philox(builder, number, seed)):
                kept = builder.icmp_unsigned(">=", builder.bitcast(bits, short), limit)
                place = builder.add(at, at.type(part * width))
                given = load(builder, vector_at(context, builder, x_type, x, place, width), size)
                result = builder.fmul(given, builder.select(kept, scale, nothing))
                builder.store(result, vector_at(context, builder, y_type, y, place, width)).align = size
            return context.get_dummy_value()

        one = index_type
        return types.void(y, x, one, one, one, one, scales), generate

    return drop
