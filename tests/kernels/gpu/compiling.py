"""Compiles the launches of Triton kernels for GPUs that need not be there, and reads what the compiler made of them.

    with compile_launches("sm_80") as launches:
        gpu.forward(torch.empty(8, 2048, 512, dtype=torch.bfloat16), ...)
    for launch in launches:
        assert launch.registers <= 128
        assert launch.spilled_bytes == 0

Within the block, what would launch a kernel compiles it instead, with the very types, divisibilities and constants of
that call, and the outputs stay as they were allocated. Tensors may be on the device "meta", so that real sizes cost no
memory. A grid that no GPU would take is an error.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Target:
    """A kind of GPU: how Triton names it, and what one of its multiprocessors holds."""

    backend: str
    architecture: int | str
    warp_size: int
    shared_memory: int  # bytes that a program may have
    shared_memory_total: int  # bytes of all programs of a multiprocessor
    warps: int  # of all programs of a multiprocessor
    registers: int = 65536


KIB = 1024
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * KIB, 164 * KIB, 64),  # A100
    "sm_86": Target("cuda", 86, 32, 99 * KIB, 100 * KIB, 48),  # RTX 30, A40
    "sm_90": Target("cuda", 90, 32, 227 * KIB, 228 * KIB, 64),  # H100
    "sm_100": Target("cuda", 100, 32, 227 * KIB, 228 * KIB, 64),  # B200
    "gfx942": Target("hip", "gfx942", 64, 64 * KIB, 64 * KIB, 32, 131072),  # MI300
}

TENSOR_CORE_INSTRUCTIONS = re.compile(r"^\s*(?:@\S+ )?(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_)", re.MULTILINE)
GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, and what the compiler made of it for a target."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread: registers that had to go to memory
    shared_memory: int  # bytes of a program
    occupancy: float  # of the warps that a multiprocessor could hold
    tensor_core_instructions: int  # products of matrices in the code, not how often they run
    assembly: str = field(repr=False)  # PTX or AMD's

    @property
    def programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count


@contextmanager
def compile_launches(target: str) -> Iterator[list[Launch]]:
    """Launches of kernels within the block are compiled for a target of TARGETS, and appended to the list."""
    from triton.runtime import driver, jit

    launches: list[Launch] = []
    run = jit.JITFunction.run
    active = driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if callable(grid):
            grid = grid(self.signature.bind_partial(*args, **_of_signature(self, kwargs)).arguments)
        assert all(0 < size <= limit for size, limit in zip(grid, GRID_LIMITS, strict=False)), (self.__name__, grid)
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(_read(self.__name__, tuple(grid), compiled, TARGETS[target]))
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "run", compile_only)
        driver._active = _Driver(target)
        try:
            yield launches
        finally:
            driver._active = active


def _of_signature(kernel: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the kernel, without options of the compiler such as num_warps."""
    return {name: value for name, value in kwargs.items() if name in kernel.signature.parameters}


class _Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, name: str) -> None:
        self.index = list(TARGETS).index(name)  # Triton keeps what it compiled by the number of the device
        self.target = TARGETS[name]

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.architecture, self.target.warp_size)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


# ---------------------------------------------------------------------- what the compiler made


def _read(kernel: str, grid: tuple[int, ...], compiled: Any, target: Target) -> Launch:
    assembly = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    registers, spilled = _cuda_usage(compiled) if target.backend == "cuda" else _amd_usage(assembly)
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    return Launch(
        kernel=kernel,
        grid=grid,
        warps=warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_memory=shared,
        occupancy=_occupancy(warps, registers, shared, target),
        tensor_core_instructions=len(TENSOR_CORE_INSTRUCTIONS.findall(assembly)),
        assembly=assembly,
    )


def _cuda_usage(compiled: Any) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, from the machine code."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def _amd_usage(assembly: str) -> tuple[int, int]:
    registers, spilled = (
        re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size")
    )
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), int(spilled[1])


def _occupancy(warps: int, registers: int, shared: int, target: Target) -> float:
    """The part of a multiprocessor's warps that fits its registers and its shared memory.

    Registers are given out in eights, and a program on an NVIDIA GPU has one KiB of shared memory for the system.
    """
    by_registers = target.registers // (max(registers, 1) + 7 & ~7) // (warps * target.warp_size)
    by_shared_memory = target.shared_memory_total // (shared + KIB)
    return min(by_registers * warps, by_shared_memory * warps, target.warps) / target.warps
