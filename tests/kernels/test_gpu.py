"""The Triton kernels, run on the CPU by Triton's interpreter, against float64 definitions; and that they compile.

Triton decides on import whether it interprets, and other tests need it not to. So each `test_` function here starts a
process of its own, which runs `check_` functions of this file.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_gradients import assert_log_scales_are_constants
from tests.kernels.test_gradients import check_gradients as check_gradients  # run_checks finds it here

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

ROOT = Path(__file__).parent.parent.parent
SHARED_MEMORY = 99 * 1024  # bytes that a program may have on the smaller of the GPUs named below
KERNELS = (1, 3, 7, 31)
MORE_KERNELS = (1, 2, 4, 5, 8, 12, 16, 17, 24, 33, 48, 63, 64)
LOW_PRECISIONS = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------- the processes


def run_checks(names: str, folder: Path, marks: str = "not nightly", interpreted: bool = True) -> None:
    """Runs the checks of this file whose names contain `names`; fails with what they printed."""
    pytest_options = ["-o", "python_functions=check_*", "-k", names, "-m", marks, "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *pytest_options, __file__]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment["TRITON_CACHE_DIR"] = str(folder)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("names", ["check_convolution", "check_scan", "check_gradients"])
def test_against_float64(names: str, tmp_path: Path) -> None:
    run_checks(names, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("names", ["check_convolution", "check_scan"])
def test_more_sizes_against_float64(names: str, tmp_path: Path) -> None:
    run_checks(names, tmp_path, marks="nightly")


def test_kernels_compile(tmp_path: Path) -> None:
    run_checks("check_compiles", tmp_path, interpreted=False)


@pytest.mark.nightly
def test_kernels_compile_for_more_gpus(tmp_path: Path) -> None:
    run_checks("check_compiles", tmp_path, marks="nightly", interpreted=False)


# ---------------------------------------------------------------------- what checks share


@pytest.fixture
def poisoned():
    """Memory that torch.empty returns is full of NaN, so that what a kernel leaves out shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def conv(poisoned) -> ModuleType:
    return importlib.import_module("subquad.kernels.conv.gpu")


@pytest.fixture
def scan(poisoned) -> ModuleType:
    return importlib.import_module("subquad.kernels.scan.gpu")


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest value expected."""
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), (error / expected.abs().max()).item()  # false for NaN


def tolerance_of(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 2e-2)


# ---------------------------------------------------------------------- convolution


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


@pytest.mark.parametrize("own", [False, True])
def check_convolution_of_nothing(conv, own):
    x, taps = torch.randn(0, 5, 4), torch.randn((0, 5, 2, 3) if own else (2, 3))
    assert conv.forward(x, taps, 1, 5).shape == (0, 5, 4)
    assert conv.input_gradient(x, taps, 1, 5).shape == (0, 5, 4)
    assert torch.equal(conv.tap_gradient(x, x, 1, tuple(taps.shape)), torch.zeros(0, 5, 2, 3) if own else 0 * taps)


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


# ---------------------------------------------------------------------- scan


def summed(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> list[Tensor]:
    """The definition, all pairs at once."""
    decay = (log_scale[..., None, :] - log_scale[..., None]).clamp(max=0).exp().tril()
    carried = (log_scale_before[..., None] - log_scale).exp()[..., None]
    last = (k * decay[..., -1, :, None]).transpose(-1, -2) @ v + carried[..., -1:, :] * before
    return [((q @ k.transpose(-1, -2)) * decay) @ v + carried * (q @ before), last]


def scan_inputs(time: int, width: int, channels: int, rise: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, log_scale, before, log_scale_before. The first head keeps its scale, the second's rises at times.

    The former has the largest values, so that errors are not compared with numbers too small for float32.
    """
    q, k = (torch.rand(1, 2, time, width, dtype=dtype) for _ in range(2))
    v, before = torch.randn(1, 2, time, channels, dtype=dtype), torch.randn(1, 2, width, channels, dtype=dtype)
    log_scale_before = torch.randn(1, 2, dtype=dtype)
    rises = 2 * rise * torch.rand(1, 2, time, dtype=dtype) * (torch.rand(1, 2, time) < 0.2)
    rises[:, 0] = 0
    return [q, k, v, log_scale_before[..., None] + rises.cumsum(-1), before, log_scale_before]


def assert_scans(scan: ModuleType, inputs: list[Tensor], tolerance: float) -> None:
    """y, the last sums, and the gradients of q, k, v and before, through both outputs."""
    learned = [0, 1, 2, 4]
    ours = [t.clone().requires_grad_(i in learned) for i, t in enumerate(inputs)]
    exact = [t.double().requires_grad_(i in learned) for i, t in enumerate(inputs)]
    found, expected = scan.causal_sums(*ours), summed(*exact)
    gradients = [torch.randn(t.shape, dtype=torch.float64).to(inputs[0].dtype) for t in expected]
    found_gradients = torch.autograd.grad(found, [ours[i] for i in learned], gradients)
    wide = [g.double() for g in gradients]
    for ours_, exact_ in zip(
        [*found, *found_gradients],
        [*expected, *torch.autograd.grad(expected, [exact[i] for i in learned], wide)],
        strict=True,
    ):
        assert ours_.dtype == inputs[0].dtype
        assert_near(ours_, exact_, tolerance)


@pytest.mark.parametrize("rise", [2.0, 300.0])
@pytest.mark.parametrize(
    ("time", "width", "channels"), [(1, 4, 3), (7, 33, 5), (64, 16, 17), (67, 8, 65), (150, 8, 33)]
)
def check_scan(scan, time, width, channels, rise):
    assert_scans(scan, scan_inputs(time, width, channels, rise), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISIONS])
def check_scan_precisions(scan, dtype):
    assert_scans(scan, scan_inputs(71, 9, 5, 2.0, dtype), tolerance_of(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("time", [63, 65, 128, 129, 513])
@pytest.mark.parametrize("width", [1, 31, 64, 129])
def check_scan_of_many_sizes(scan, time, width):
    for rise in (0.1, 20.0):
        assert_scans(scan, scan_inputs(time, width, 65, rise), 1e-6)


def check_scan_of_a_fresh_state_and_late_tokens(scan):
    """Log scales lie at -1e30 until a row reads its first token, as the performer has it."""
    q, k, v, log_scale, before, log_scale_before = scan_inputs(70, 6, 4, 1.0)
    log_scale[:, 0, :66], log_scale_before[:] = -1e30, -1e30
    k[:, 0, :66] = 0
    assert_scans(scan, [q, k, v, log_scale, torch.zeros_like(before), log_scale_before], 1e-6)


def check_scan_gradients_treat_log_scales_as_constants(poisoned, monkeypatch):
    assert_log_scales_are_constants("gpu", monkeypatch)


def check_scan_in_parts_equals_one_pass(scan):
    q, k, v, log_scale, before, log_scale_before = scan_inputs(100, 8, 5, 3.0)
    whole, last = scan.causal_sums(q, k, v, log_scale, before, log_scale_before)
    parts, start = [], 0
    for length in (1, 70, 5, 24):
        piece = slice(start, start + length)
        y, before = scan.causal_sums(
            q[:, :, piece], k[:, :, piece], v[:, :, piece], log_scale[:, :, piece], before, log_scale_before
        )
        parts.append(y)
        log_scale_before, start = log_scale[:, :, start + length - 1], start + length
    assert_near(torch.cat(parts, 2), whole.double(), 1e-6)
    assert_near(before, last.double(), 1e-6)


def check_scan_is_a_sound_op(scan):
    inputs = scan_inputs(19, 5, 3, 2.0)
    learned = [inputs[i].requires_grad_() for i in (0, 1, 2, 4)]
    torch.library.opcheck(torch.ops.subquad.causal_scan.default, tuple(inputs))
    compiled = torch.compile(scan.causal_sums, backend="aot_eager", fullgraph=True)
    ours, eager = (
        [y, *torch.autograd.grad(y.square().sum(), learned)]
        for y in (f(*inputs)[0] for f in (compiled, scan.causal_sums))
    )
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- compiling


def build(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], target: tuple[str, Any, int]) -> None:
    """Compiles for a GPU that need not be there. Arguments that are neither pointers nor constants are integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, kinds, constexprs=places), target=GPUTarget(*target))
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "tf32" not in compiled.asm.get("ptx", "")


def build_all(target: tuple[str, Any, int], values: str, sums: str, tile: tuple[int, int], chunk: int) -> None:
    from subquad.kernels.conv import gpu as conv_gpu
    from subquad.kernels.scan import gpu as scan_gpu

    # Triton takes arguments that are 1 for constants.
    sizes = {"TIME": tile[0], "CHANNELS": tile[1], "COUNT": 7} | ({"head_width": 1, "heads": 1} if tile[1] == 1 else {})
    for own in (False, True):
        for transposed in (False, True):
            pointers = {"source": f"*{values}", "taps": f"*{sums}", "out": f"*{values}"}
            build(conv_gpu._convolve, pointers, sizes | {"OWN": own, "TRANSPOSED": transposed}, target)
        pointers = {"grad": f"*{values}", "source": f"*{values}", "out": f"*{sums}"}
        build(conv_gpu._tap_products, pointers, sizes | {"OWN": own}, target)
    for future in (False, True):
        constants = {"FUTURE": future, "CHUNK": chunk, "TILE": scan_gpu.TILE}
        for kernel in (scan_gpu._carry, scan_gpu._mix):
            integers = {"time", "rows", "columns", "inner", "inner_stride", "column_stride", *constants}
            pointers = {name: f"*{sums}" for name in kernel.arg_names if name not in integers}
            build(kernel, pointers, constants, target)


def check_compiles():
    build_all(("cuda", 80, 32), "bf16", "fp32", tile=(32, 64), chunk=16)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "target", [("cuda", 75, 32), ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str
)
@pytest.mark.parametrize(("values", "sums"), [("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
@pytest.mark.parametrize("tile", [(32, 64), (256, 1), (1, 64)], ids=str)
def check_compiles_for_many(target, values, sums, tile):
    build_all(target, values, sums, tile, chunk=64)
