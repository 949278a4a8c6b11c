"""The Triton kernels of the tap convolution, in the interpreter against float64, and as compilers see them."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.compiling import TARGETS, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton, tolerance_of

pytestmark = needs_triton

KERNELS = (1, 3, 7, 31)
MORE_KERNELS = (1, 2, 4, 5, 8, 12, 16, 17, 24, 33, 48, 63, 64, 65)


@pytest.fixture
def conv(poisoned) -> ModuleType:
    return importlib.import_module("subquad.kernels.conv.gpu")


def convolved(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:
    """The definition: y[b, t, c] = sum_k taps[(b, t,) head(c), k] x[b, t - before + k, c], zeros outside x."""
    heads, kernel = taps.shape[-2:]
    by_head = x.unflatten(-1, (heads, -1))
    total = torch.zeros(x.shape[0], length, *by_head.shape[2:], dtype=x.dtype)
    for k in range(kernel):
        sources = torch.arange(length) - before + k
        there = ((sources >= 0) & (sources < x.shape[1]))[:, None, None]
        total = total + by_head[:, sources.clamp(0, x.shape[1] - 1)] * there * taps[..., k, None]
    return total.flatten(2)


def placements(kernel: int, time: int) -> list[tuple[int, int]]:
    """before and length: causal, centred, and a stream's step, if the input is long enough for one."""
    step = [(0, time - kernel + 1)] if time >= kernel else []
    return [(kernel - 1, time), ((kernel - 1) // 2, time), *step]


def assert_convolves(
    conv: ModuleType, sizes: tuple[int, ...], before: int, length: int, own: bool, dtype: torch.dtype
) -> None:
    """Output and both gradients, in the given type, against float64 and autograd."""
    batch, time, heads, width, kernel = sizes
    wide = torch.promote_types(dtype, torch.float32)
    x, grad = (torch.randn(batch, n, heads * width, dtype=wide).to(dtype) for n in (time, length))
    taps = torch.randn((batch, length, heads, kernel) if own else (heads, kernel), dtype=wide)
    inputs = x.double().requires_grad_(), taps.double().requires_grad_()
    expected = convolved(*inputs, before, length)
    x_gradient, tap_gradient = torch.autograd.grad(expected, inputs, grad.double())

    y = conv.forward(x, taps, before, length)
    found_x = conv.input_gradient(grad, taps, before, time)
    found_taps = conv.tap_gradient(grad, x, before, tuple(taps.shape))
    assert (y.dtype, found_x.dtype, found_taps.dtype) == (dtype, dtype, wide)
    assert_near(y, expected, tolerance_of(dtype))
    assert_near(found_x, x_gradient, tolerance_of(dtype))
    assert_near(found_taps, tap_gradient, {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2))
    if own and before == kernel - 1 and kernel <= conv.MOST_FUSED_TAPS:
        assert_convolves_with_softmax(conv, x, 3 * taps.to(dtype), grad, before)


def assert_convolves_with_softmax(conv: ModuleType, x: Tensor, logits: Tensor, grad: Tensor, before: int) -> None:
    """The same with taps that are the softmax of logits in the precision of x."""
    inputs = x.double().requires_grad_(), logits.double().requires_grad_()
    expected = convolved(inputs[0], inputs[1].softmax(-1), before, grad.shape[1])
    gradients = torch.autograd.grad(expected, inputs, grad.double())
    found = conv.softmax_gradients(grad, x, logits, before)
    assert [one.dtype for one in found] == [x.dtype, x.dtype]
    assert_near(conv.softmax_forward(x, logits, before, grad.shape[1]), expected, tolerance_of(x.dtype))
    for ours, exact in zip(found, gradients, strict=True):
        assert_near(ours, exact, {torch.float64: 1e-13, torch.float32: 1e-5}.get(x.dtype, 2e-2))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def check_convolution(conv, kernel, own):
    for before, length in placements(kernel, 37):
        assert_convolves(conv, (1, 37, 2, 5, kernel), before, length, own, torch.float32)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISIONS])
def check_convolution_precisions(conv, dtype, own):
    for before, length in placements(4, 21):
        assert_convolves(conv, (2, 21, 2, 3, 4), before, length, own, dtype)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 37, 2, 70, 3), id="several tiles of time and of a head's channels"),
        pytest.param((1, 261, 3, 1, 2), id="heads of one channel"),
        pytest.param((3, 5, 1, 8, 9), id="more taps than positions"),
        pytest.param((2, 1, 2, 4, 3), id="one position"),
        pytest.param((2, 1, 2, 4, 1), id="one position and one tap"),
    ],
)
def check_convolution_sizes(conv, sizes, own):
    for before, length in placements(sizes[-1], sizes[1]):
        assert_convolves(conv, sizes, before, length, own, torch.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS])
@pytest.mark.parametrize("kernel", MORE_KERNELS)
def check_convolution_of_many_kernels(conv, kernel, dtype, own):
    heads, width = (1, 65) if dtype == torch.float32 else (2, 9)
    for before, length in placements(kernel, 67):
        assert_convolves(conv, (1, 67, heads, width, kernel), before, length, own, dtype)


@pytest.mark.parametrize("own", [False, True])
def check_convolution_of_views(conv, own):
    x, grad = (torch.randn(6, 2, 9).transpose(0, 1).transpose(1, 2) for _ in range(2))  # (2, 9, 6)
    taps = torch.randn(3, 9, 2, 2).permute(2, 1, 3, 0) if own else torch.randn(3, 2).T
    assert not x.is_contiguous()
    assert not taps.is_contiguous()
    plain = x.contiguous(), grad.contiguous(), taps.contiguous()
    assert torch.equal(conv.forward(x, taps, 1, 9), conv.forward(plain[0], plain[2], 1, 9))
    assert torch.equal(conv.input_gradient(grad, taps, 1, 9), conv.input_gradient(plain[1], plain[2], 1, 9))
    found = conv.tap_gradient(grad, x, 1, tuple(taps.shape))
    assert torch.equal(found, conv.tap_gradient(plain[1], plain[0], 1, tuple(taps.shape)))
    if own:
        assert torch.equal(conv.softmax_forward(x, taps, 1, 9), conv.softmax_forward(plain[0], plain[2], 1, 9))
        pairs = zip(
            conv.softmax_gradients(grad, x, taps, 1),
            conv.softmax_gradients(plain[1], plain[0], plain[2], 1),
            strict=True,
        )
        assert all(torch.equal(ours, same) for ours, same in pairs)


@pytest.mark.parametrize("own", [False, True])
def check_convolution_of_nothing(conv, own):
    x, taps = torch.randn(0, 5, 4), torch.randn((0, 5, 2, 3) if own else (2, 3))
    assert conv.forward(x, taps, 1, 5).shape == (0, 5, 4)
    assert conv.input_gradient(x, taps, 1, 5).shape == (0, 5, 4)
    assert torch.equal(conv.tap_gradient(x, x, 1, tuple(taps.shape)), torch.zeros(0, 5, 2, 3) if own else 0 * taps)
    if own:
        assert [one.shape for one in conv.softmax_gradients(x, x, taps, 1)] == [x.shape, taps.shape]


@pytest.mark.parametrize("own", [False, True])
def check_convolution_as_the_op_runs_it(poisoned, monkeypatch, own):
    from subquad.kernels.conv import gpu, tap_conv

    x, taps = torch.randn(2, 9, 6), torch.randn((2, 9, 2, 3) if own else (2, 3))
    leaves = x.requires_grad_(), taps.requires_grad_()
    results = []
    for kernels in ("reference", "gpu"):
        monkeypatch.setenv("SUBQUAD_KERNELS", kernels)
        y = tap_conv(*leaves, 2)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for ours, plain in zip(*reversed(results), strict=True):
        assert_near(ours, plain.double(), 1e-6)
    assert torch.equal(results[1][0], gpu.forward(x.detach(), taps.detach(), 2, 9))


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compiles the output and both gradients, for shared and own taps, and for logits of own ones."""
    from subquad.kernels.conv import gpu

    batch, time, heads, width, kernel = sizes
    x = torch.empty(batch, time, heads * width, dtype=dtype, device="meta")
    with compile_launches(target) as launches:
        for own in (False, True):
            taps = torch.empty((batch, time, heads, kernel) if own else (heads, kernel), device="meta")
            gpu.forward(x, taps, kernel - 1, time)
            gpu.input_gradient(x, taps, kernel - 1, time)
            gpu.tap_gradient(x, x, kernel - 1, tuple(taps.shape))
        logits = torch.empty(batch, time, heads, kernel, dtype=dtype, device="meta")
        gpu.softmax_forward(x, logits, kernel - 1, time)
        gpu.softmax_gradients(x, x, logits, kernel - 1)
    assert len(launches) == 9
    for launch in launches:
        assert launch.spilled_bytes == 0, launch
        assert launch.shared_memory <= TARGETS[target].shared_memory, launch
        assert launch.occupancy >= (0.25 if dtype.itemsize <= 4 else 0.125), launch
        assert "tf32" not in launch.assembly, launch


def test_compiles(triton_cache: None) -> None:
    compile_all("sm_80", (8, 2048, 8, 64, 31), torch.bfloat16)


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(8, 2048, 8, 64, 31), (2, 300, 4, 1, 7), (2, 1, 8, 64, 3)], ids=str)
def test_compiles_for_many(target: str, dtype: torch.dtype, sizes: tuple[int, ...], triton_cache: None) -> None:
    compile_all(target, sizes, dtype)
