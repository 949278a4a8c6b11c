"""What Triton kernels share: matrix products on tensor cores, and in which precision they run."""

from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run on CPU tensors: TRITON_INTERPRET=1 was in the environment when triton was imported."""

_interpreted = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """a @ b, summed in float32: on tensor cores in the precision of a and b, which are the same.

    PRECISION is that of float32 products, from `dot_precision`. Triton's interpreter takes the bits of bfloat16 for
    integers, so there the products are of float32 numbers, which the rounded ones are as well.
    """
    if _interpreted:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


def dot_precision() -> str:
    """How float32 factors are multiplied: exactly, or rounded to TF32 where torch may do so with its own products."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def factors(dtype: torch.dtype) -> dict[str, Any]:
    """FACTOR, to which factors of products are converted, and PRECISION, for inputs of a precision.

    bfloat16 is multiplied as it is. float16 goes to TF32, which has its digits and the range of float32: what has a
    scale, such as sums or gradients over a divisor, may exceed 65,504.
    """
    if dtype == torch.bfloat16:
        return {"FACTOR": tl.bfloat16, "PRECISION": "ieee"}
    return {"FACTOR": tl.float32, "PRECISION": "tf32" if dtype == torch.float16 else dot_precision()}


def register_limit(registers: int | None) -> dict[str, int]:
    """The option of a launch by which a thread gets at most so many registers; none: the compiler decides.

    Only the compiler of NVIDIA's GPUs takes it.
    """
    return {"maxnreg": registers} if registers is not None and torch.version.hip is None else {}
