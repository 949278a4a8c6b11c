"""The mixers that are counted: every mechanism as its paper or its recipes have it, 16,384 tokens a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.counting import Kernel, count_mixer
from benchmarks.gpu.hardware import GPU
from subquad.mixers import build

DIM, HEADS, TOKENS = 512, 8, 16384
LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True)
class Row:
    """A mixer of the table."""

    label: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)


ROWS = (
    Row("softmax", "softmax"),
    Row("softmax, causal", "softmax", {"causal": True}),
    Row("lightconv, causal, 31 taps", "lightconv", {"causal": True}),
    Row("dynamicconv, causal, 31 taps", "dynamicconv", {"causal": True}),
    Row("local, windows of 64", "local", {"window": 64}),
    Row("eva, windows of 64, 49 chunks", "eva", {"window": 64}),
    Row("eva, causal, windows and chunks of 64", "eva", {"window": 64, "chunk_size": 64, "causal": True}),
    Row("lara, 49 landmarks", "lara"),
    Row("performer, 64 features", "performer"),
    Row("performer, causal, 64 features", "performer", {"causal": True}),
    Row("primal", "primal"),
    Row("primal, causal", "primal", {"causal": True}),
    Row("linformer, 256 slots", "linformer", {"proj_k": 256, "max_length": 8192}),
    Row("scatterbrain", "scatterbrain"),
    Row("ra", "ra", {"proposal": "softmax"}),
)


@dataclass(frozen=True)
class Counted:
    """What a mixer launches in a forward and a backward pass at one length."""

    row: Row
    length: int
    kernels: list[Kernel]

    @property
    def gigabytes(self) -> float:
        return sum(kernel.bytes for kernel in self.kernels) / 1e9

    def milliseconds(self, gpu: GPU) -> float:
        return 1e3 * sum(kernel.seconds(gpu) for kernel in self.kernels)


def count_row(row: Row, length: int) -> Counted:
    mixer = build(row.mechanism, dim=DIM, heads=HEADS, **row.options)
    return Counted(row, length, count_mixer(mixer, TOKENS // length, length))
