"""Run by `test_counting.py`: launches, bytes and FLOPs, and the kernels that a GPU would take."""

import pytest
import torch

from benchmarks.gpu.counting import count_mixer, counting
from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda
from benchmarks.gpu.hardware import A100, FLOAT32, TENSOR
from benchmarks.gpu.inductor import count_compiled
from benchmarks.gpu.rows import ROWS, count_row
from subquad.kernels.dispatch import choose
from subquad.mixers import build


def check_a_product_is_one_launch_of_its_operands_bytes() -> None:
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
    kernels = count_mixer(build("lightconv", dim=64, heads=4, causal=True), 2, 100).kernels
    names = [kernel.name for kernel in kernels if "." in kernel.name and kernel.name.startswith("conv.")]
    assert names == ["conv._convolve", "conv._convolve", "conv._tap_products"]
    assert [kernel.phase for kernel in kernels if kernel.name in names] == ["forward", "backward", "backward"]
    products = [kernel for kernel in kernels if kernel.name in ("addmm", "mm")]
    assert len(products) == 6  # two linear maps, each with the gradients of its input and its weight
    assert {kind for kernel in products for kind, _ in kernel.flops} == {"tensor cores"}


def check_attention_is_flash_attention() -> None:
    softmax, causal = (count_row(row, 2048) for row in ROWS[:2])
    flops = sum(n for kernel in softmax.kernels for kind, n in kernel.flops if kind == "flash")
    assert flops == pytest.approx(3.5 * 4 * 16384 * 2048 * 512 * (2048 + 160) / 2048)
    assert causal.milliseconds(A100) < softmax.milliseconds(A100)


def check_memory_is_what_lives_at_once() -> None:
    with fake_cuda(), counting() as counter:
        for _ in range(3):
            x = torch.empty(1000, device=DEVICE)
            x = x + 1  # two live while the sum is made, and the sum before, of which there is a view
            y = x[:10]
        assert counter.live == 4 * 1000
        del x, y
    assert (counter.live, counter.peak) == (0, 4 * 3000)


def check_a_pass_that_reads_a_number_waits() -> None:
    with fake_cuda(), counting() as counter:
        x = torch.empty(8, device=DEVICE)
        assert float(x.sum()) == 1
        assert (x > 0).nonzero().shape == (8, 1)
    assert counter.waits == 2


def check_operations_take_their_gpu_kernel() -> None:
    with fake_cuda():
        assert choose("conv", torch.empty(1, device=DEVICE)).__name__ == "subquad.kernels.conv.gpu"


def check_compiling_fuses_and_breaks_no_graph() -> None:
    options = {"dim": 64, "heads": 4, "causal": True}
    plain = count_mixer(build("primal", **options), 2, 64).kernels
    compiled = count_compiled(build("primal", **options), 2, 64)
    assert compiled.graphs == 1
    assert compiled.launches < len(plain)
    assert 0 < compiled.bytes < sum(kernel.bytes for kernel in plain)
