"""The model that turns counts into times: a launch takes a moment, and then what is slower of memory and arithmetic.

    seconds = launch + max(bytes / bandwidth, sum over kinds of FLOPs / speed of the kind)

Speeds are what well-written kernels reach, about two thirds of the data sheets, not the data sheets' own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

TENSOR = "tensor cores"
"""Matrix products of bfloat16 or float16."""
FLOAT32 = "float32"
"""Everything else: float32 matrix products of cuBLAS, TF32 among them, and multiply-adds outside of matrix products."""
FLOAT32_DOT = "float32 dot"
"""`tl.dot` of float32 without TF32: Triton makes single multiply-adds of it, whose operands overflow the registers."""


FLASH, FLASH_CAUSAL = "flash", "causal flash"
"""Attention of torch's own kernel on long sequences (`flash.py`)."""

HOST = 7e-6
"""Seconds that Python and torch take to launch a kernel: a pass cannot be faster than all of its launches."""


@dataclass(frozen=True)
class GPU:
    """bandwidth in bytes a second, speeds in FLOP/s by kind, launch in seconds."""

    name: str
    bandwidth: float
    speeds: Mapping[str, float]
    launch: float

    def seconds(self, moved: int, flops: Mapping[str, float]) -> float:
        """The time of one launch that moves so many bytes."""
        return self.launch + max(moved / self.bandwidth, sum(n / self.speeds[kind] for kind, n in flops.items()))


A100 = GPU(
    name="A100",
    bandwidth=1.5e12,
    speeds={TENSOR: 200e12, FLOAT32: 14e12, FLOAT32_DOT: 5e12, FLASH: 175e12, FLASH_CAUSAL: 171e12},
    launch=2.5e-6,
)
H100 = GPU(  # the A100's shares of the data sheet; flash attention as fast as the faster of torch's two kernels
    name="H100",
    bandwidth=2.5e12,
    speeds={TENSOR: 630e12, FLOAT32: 48e12, FLOAT32_DOT: 17e12, FLASH: 400e12, FLASH_CAUSAL: 390e12},
    launch=2.5e-6,
)
GPUS = (A100, H100)
