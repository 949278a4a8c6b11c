"""The Triton kernels of linear attention through features, in the interpreter against float64, and compiled."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.compiling import TARGETS, Launch, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton, tolerance_of
from tests.kernels.test_feature_attention import EPS, by_definition

pytestmark = needs_triton

LEAST = 1e-2
each_direction = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


@pytest.fixture
def gpu(poisoned) -> ModuleType:
    return importlib.import_module("subquad.kernels.feature_attention.gpu")


def problem(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """qkv, as a linear map would give it, and W, which bfloat16 has exactly, as it is rounded to that."""
    batch, time, heads, width, features = sizes
    qkv = torch.randn(batch, time, 3 * heads * width).to(dtype).unflatten(-1, (3, heads, width))
    return qkv.requires_grad_(), torch.randn(heads, features, width).bfloat16().float().requires_grad_()


def padding_mask(batch: int, time: int) -> Tensor:
    """One row is whole, and one of several is empty."""
    lengths = torch.randint(1, time + 1, (batch, 1))
    lengths[0], lengths[-1] = time, 0 if batch > 1 else time
    return torch.arange(time) < lengths


def results(gpu: ModuleType, qkv: Tensor, matrix: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    """y and the gradients of qkv and W."""
    y = gpu.feature_attention(qkv, matrix, mask, EPS, LEAST, causal, Tensor.detach)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [qkv, matrix], upstream)]


def expected(qkv: Tensor, matrix: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    exact = qkv.detach().double().requires_grad_(), matrix.detach().double().requires_grad_()
    y = by_definition(*exact, mask, LEAST, causal)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(qkv.dtype)
    return [y, *torch.autograd.grad(y, exact, upstream.double())]


def assert_attends(
    gpu: ModuleType, qkv: Tensor, matrix: Tensor, mask: Tensor | None, causal: bool, tolerance: float = 1e-5
) -> None:
    """Every number within `tolerance` of the largest."""
    found = results(gpu, qkv, matrix, mask, causal)
    assert [t.dtype for t in found] == [qkv.dtype, qkv.dtype, matrix.dtype]
    for one, other in zip(found, expected(qkv, matrix, mask, causal), strict=True):
        if other.abs().max() < 1e-9:  # the gradient of W vanishes where there is one key
            continue
        assert_near(one, other, tolerance if qkv.dtype == torch.float32 else tolerance_of(qkv.dtype))


SIZES = [(2, 1, 2, 4, 5), (2, 67, 1, 20, 33)]


@each_direction
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def check_attention(gpu, sizes, causal):
    for mask in (None, padding_mask(*sizes[:2])):
        assert_attends(gpu, *problem(sizes), mask, causal, 5e-6)


@each_direction
@pytest.mark.parametrize("dtype", LOW_PRECISIONS, ids=str)
def check_precisions(gpu, dtype, causal):
    assert_attends(gpu, *problem((2, 71, 1, 16, 24), dtype), padding_mask(2, 71), causal)


@pytest.mark.nightly
@each_direction
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("time", [63, 64, 65, 513, 1300])
@pytest.mark.parametrize(("width", "features"), [(16, 1), (64, 64), (128, 130)])
def check_many_sizes(gpu, time, width, features, dtype, causal):
    assert_attends(gpu, *problem((1, time, 1, width, features), dtype), None, causal)


@each_direction
def check_scores_that_rise(gpu, causal):
    """Exponentials of the last keys are e^80 times those of the first."""
    qkv, matrix = problem((1, 100, 1, 16, 8))
    with torch.no_grad():
        qkv *= torch.linspace(0.1, 6, 100)[:, None, None, None]
    assert_attends(gpu, qkv, matrix, None, causal, 2e-5)


@each_direction
def check_absent_keys_may_hold_anything_finite(gpu, causal):
    qkv, matrix = problem((2, 70, 1, 16, 8), torch.float16)
    mask = (torch.arange(70) < 40).expand(2, -1)
    wild = torch.where(mask[:, :, None, None, None], qkv, 60000.0).detach().requires_grad_()
    y, d_qkv, d_matrix = results(gpu, wild, matrix, mask, causal)
    plain = results(gpu, qkv, matrix, mask, causal)
    assert torch.equal(y[:, :40], plain[0][:, :40])
    assert d_qkv.isfinite().all()
    assert d_matrix.isfinite().all()
    assert (d_qkv[:, 40:, 1:] == 0).all()


@pytest.mark.nightly
@each_direction
def check_views_and_equal_bits(gpu, causal):
    """Strides of the input change nothing, and neither does a second call."""
    qkv, matrix = problem((1, 35, 2, 8, 9))
    first = results(gpu, qkv, matrix, None, causal)
    turned = qkv.detach().permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0).requires_grad_()
    padded = torch.nn.functional.pad(qkv.detach(), (0, 3))[..., :8].requires_grad_()
    for again in (qkv, turned, padded):
        for one, other in zip(first, results(gpu, again, matrix, None, causal), strict=True):
            assert torch.equal(one, other)


@each_direction
def check_nothing(gpu, causal):
    qkv, matrix = problem((0, 5, 2, 4, 3))
    y, d_qkv, d_matrix = results(gpu, qkv, matrix, None, causal)
    assert y.shape == (0, 5, 2, 4)
    assert d_qkv.shape == qkv.shape
    assert torch.equal(d_matrix, torch.zeros_like(matrix))


@pytest.mark.nightly
@each_direction
def check_sound_op(gpu, causal):
    qkv, matrix = problem((2, 19, 1, 4, 3))
    given = padding_mask(2, 19), EPS, LEAST, causal
    torch.library.opcheck(torch.ops.subquad.linear_attention.default, (qkv, matrix, *given))


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, sizes: tuple[int, ...], dtype: torch.dtype, learns: bool) -> list[Launch]:
    """Compiles forward and backward, of all keys with a mask and causal without."""
    from subquad.kernels.feature_attention import gpu

    batch, time, heads, width, features = sizes
    qkv = torch.empty(batch, time, 3, heads, width, dtype=dtype, device="meta")
    matrix = torch.empty(heads, features, width, device="meta")
    with compile_launches(target) as launches:
        for causal in (False, True):
            mask = None if causal else torch.empty(batch, time, dtype=torch.bool, device="meta")
            given = mask, EPS, LEAST, causal
            out = gpu._forward._init_fn(qkv, matrix, *given)
            gpu._backward._init_fn(torch.empty_like(out[0]), *out, qkv, matrix, *given, learns)
    for launch in launches:
        assert launch.shared_memory <= TARGETS[target].shared_memory, launch
    return launches


def test_compiles(triton_cache: None) -> None:
    launches = compile_all("sm_80", (8, 2048, 8, 64, 64), torch.bfloat16, learns=False)
    assert len(launches) == 7 + 9
    for launch in launches:
        assert launch.spilled_bytes == 0, launch
        assert launch.occupancy >= 0.125, launch
        assert launch.tensor_core_instructions > 0 or launch.kernel == "_carry_kernel", launch


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("sizes", [(8, 2048, 8, 64, 64), (2, 300, 4, 128, 256), (1, 1, 1, 1, 1)], ids=str)
def test_compiles_for_many(target: str, dtype: torch.dtype, sizes: tuple[int, ...], triton_cache: None) -> None:
    for launch in compile_all(target, sizes, dtype, learns=True):
        if dtype == torch.float32:
            assert "tf32" not in launch.assembly, launch
        elif launch.kernel != "_carry_kernel":
            assert launch.tensor_core_instructions > 0, launch
