"""The mixers that are counted: every mechanism as its paper or its recipes have it, 16,384 tokens a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.counting import Kernel, count_mixer, pass_seconds
from benchmarks.gpu.hardware import GPU
from subquad.mixers import build

DIM, HEADS, TOKENS = 512, 8, 16384
LENGTHS = (512, 2048, 8192)
CROSSOVERS = tuple(2**power for power in range(7, 15))
"""Lengths among which a crossover is looked for."""


@dataclass(frozen=True)
class Row:
    """A mixer of the table. target: milliseconds on an A100 that it is meant to reach at every one of LENGTHS."""

    label: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = None

    @property
    def causal(self) -> bool:
        return bool(self.options.get("causal", False))


ROWS = (
    Row("softmax", "softmax"),
    Row("softmax, causal", "softmax", {"causal": True}),
    Row("lightconv, causal, 31 taps", "lightconv", {"causal": True}, target=0.9),
    Row("dynamicconv, causal, 31 taps", "dynamicconv", {"causal": True}, target=0.9),
    Row("local, windows of 64", "local", {"window": 64}, target=1.0),
    Row("eva, windows of 64, 49 chunks", "eva", {"window": 64}, target=1.3),
    Row("eva, causal, windows and chunks of 64", "eva", {"window": 64, "chunk_size": 64, "causal": True}, target=1.3),
    Row("lara, 49 landmarks", "lara", target=1.3),
    Row("performer, 64 features", "performer", target=1.2),
    Row("performer, causal, 64 features", "performer", {"causal": True}, target=1.6),
    Row("primal", "primal", target=1.2),
    Row("primal, causal", "primal", {"causal": True}, target=1.2),
    Row("linformer, 256 slots", "linformer", {"proj_k": 256, "max_length": 16384}),
    Row("scatterbrain", "scatterbrain"),
    Row("ra", "ra", {"proposal": "softmax"}),
)


@dataclass(frozen=True)
class Counted:
    """What a mixer launches in a forward and a backward pass at one length. peak: bytes, without its input."""

    row: Row
    length: int
    kernels: list[Kernel]
    peak: int

    @property
    def gigabytes(self) -> float:
        return sum(kernel.bytes for kernel in self.kernels) / 1e9

    def milliseconds(self, gpu: GPU) -> float:
        return 1e3 * pass_seconds(self.kernels, gpu)


def count_row(row: Row, length: int) -> Counted:
    mixer = build(row.mechanism, dim=DIM, heads=HEADS, **row.options)
    counter = count_mixer(mixer, TOKENS // length, length)
    return Counted(row, length, counter.kernels, counter.peak)
