"""The Triton kernels of the causal scan, in the interpreter against float64, and as compilers see them."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.compiling import TARGETS, Launch, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton, tolerance_of
from tests.kernels.test_gradients import assert_log_scales_are_constants

pytestmark = needs_triton


@pytest.fixture
def scan(poisoned) -> ModuleType:
    return importlib.import_module("subquad.kernels.scan.gpu")


def summed(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> list[Tensor]:
    """The definition, all pairs at once."""
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    decay = (log_scale[..., None, :] - log_scale[..., None]).clamp(max=0).exp().tril()
    carried = (log_scale_before[..., None] - log_scale).exp()[..., None]
    last = (k * decay[..., -1, :, None]).transpose(-1, -2) @ v + carried[..., -1:, :] * before
    return [((q @ k.transpose(-1, -2)) * decay) @ v + carried * (q @ before), last]


def scan_inputs(time: int, width: int, channels: int, rise: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, log_scale, before, log_scale_before. The first head keeps its scale, the second's rises at times.

    The former has the largest values, so that errors are not compared with numbers too small for float32.
    """
    q, k = (torch.rand(1, 2, time, width, dtype=dtype) for _ in range(2))
    v, before = torch.randn(1, 2, time, channels, dtype=dtype), torch.randn(1, 2, width, channels + 1, dtype=dtype)
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


@pytest.mark.parametrize("dtype", LOW_PRECISIONS)
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


@pytest.mark.nightly
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


def compile_all(target: str, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Launch]:
    """Compiles forward and backward for features in float32 and values of a precision."""
    from subquad.kernels.scan import gpu

    batch, heads, time, width, channels = sizes
    q, k = (torch.empty(batch, heads, time, width, device="meta") for _ in range(2))
    v = torch.empty(batch, time, 3, heads, channels, dtype=dtype, device="meta")[:, :, 2].transpose(1, 2)
    log_scale, log_scale_before = q[..., 0].contiguous(), q[..., 0, 0].contiguous()
    before = torch.empty(batch, heads, width, channels + 1, device="meta")
    grad = torch.empty(batch, heads, time, channels + 1, device="meta")
    scales = log_scale, before, log_scale_before
    with compile_launches(target) as launches:
        gpu._scan._init_fn(q, k, v, *scales)
        gpu._scan_backward._init_fn(grad, before, q, k, v, *scales)
    for launch in launches:
        assert launch.spilled_bytes == 0, launch
        assert launch.shared_memory <= TARGETS[target].shared_memory, launch
    return launches


def test_compiles(triton_cache: None) -> None:
    launches = compile_all("sm_80", (8, 8, 2048, 64, 64), torch.bfloat16)
    assert [launch.kernel for launch in launches] == [
        *("_sum_chunks_kernel", "_carry_kernel", "_mix_kernel"),
        *("_sum_chunks_kernel", "_carry_kernel", "_sum_chunks_kernel", "_carry_kernel", *["_mix_kernel"] * 3),
    ]
    for launch in launches:
        assert launch.occupancy >= 0.125, launch
        assert launch.tensor_core_instructions > 0 or launch.kernel == "_carry_kernel", launch


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("sizes", [(8, 8, 2048, 64, 64), (2, 4, 300, 256, 128), (1, 1, 1, 1, 2)], ids=str)
def test_compiles_for_many(target: str, dtype: torch.dtype, sizes: tuple[int, ...], triton_cache: None) -> None:
    for launch in compile_all(target, sizes, dtype):
        if dtype == torch.float32:
            assert "tf32" not in launch.assembly, launch
        elif launch.kernel != "_carry_kernel":
            assert launch.tensor_core_instructions > 0, launch
