"""What is counted on fake GPU tensors: launches, bytes and FLOPs, and the kernels that a GPU would take.

Counting leaves a CUDA guard in the process (`tools/cuda_guard`), so the `check_` functions run in one of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import cuda_guard

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(cuda_guard.why_unavailable() is not None, reason="needs a C++ compiler"),
]
ROOT = Path(__file__).parents[3]


def test_counts() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    options = ["-o", "python_functions=check_*"]
    result = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def check_a_product_is_one_launch_of_its_operands_bytes() -> None:
    from benchmarks.gpu.counting import counting
    from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda
    from benchmarks.gpu.hardware import A100, FLOAT32, TENSOR

    with fake_cuda(), counting() as counter:
        a, b = torch.empty(64, 32, device=DEVICE, dtype=torch.bfloat16), torch.empty(32, device=DEVICE)
        a @ a.t()
        b.expand(64, 32) + 1  # a row that is repeated is read once
    product, addition = counter.kernels
    operands = 2 * 2 * 64 * 32  # two, although they are views of the same numbers
    assert (product.bytes, product.flops) == (operands + 2 * 64 * 64, ((TENSOR, 2 * 64 * 64 * 32),))
    assert (addition.bytes, addition.flops) == (4 * 32 + 4 * 64 * 32, ())
    assert product.seconds(A100) == pytest.approx(2.5e-6 + product.bytes / 1.5e12)
    assert A100.seconds(0, {FLOAT32: 14e12}) == pytest.approx(1 + 2.5e-6)


def check_mixers_take_the_kernels_of_the_gpu() -> None:
    from benchmarks.gpu.counting import count_mixer
    from subquad.mixers import build

    kernels = count_mixer(build("lightconv", dim=64, heads=4, causal=True), 2, 100).kernels
    names = [kernel.name for kernel in kernels if "." in kernel.name and kernel.name.startswith("conv.")]
    assert names == ["conv._convolve", "conv._convolve", "conv._tap_products"]
    assert [kernel.phase for kernel in kernels if kernel.name in names] == ["forward", "backward", "backward"]
    products = [kernel for kernel in kernels if kernel.name in ("addmm", "mm")]
    assert len(products) == 6  # two linear maps, each with the gradients of its input and its weight
    assert {kind for kernel in products for kind, _ in kernel.flops} == {"tensor cores"}


def check_attention_is_flash_attention() -> None:
    from benchmarks.gpu.hardware import A100
    from benchmarks.gpu.rows import ROWS, count_row

    softmax, causal = (count_row(row, 2048) for row in ROWS[:2])
    flops = sum(n for kernel in softmax.kernels for kind, n in kernel.flops if kind == "flash")
    assert flops == pytest.approx(3.5 * 4 * 16384 * 2048 * 512 * (2048 + 160) / 2048)
    assert causal.milliseconds(A100) < softmax.milliseconds(A100)
