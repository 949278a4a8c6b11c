"""The Triton kernels of primal attention's scores, in the interpreter against float64, and compiled."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from subquad.testing.precision import TOLERANCE
from tests.kernels.gpu.compiling import TARGETS, Launch, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton

pytestmark = needs_triton

each_direction = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


@pytest.fixture
def gpu(poisoned) -> ModuleType:
    return importlib.import_module("subquad.kernels.primal_scores.gpu")


def by_definition(qk: Tensor, weights: Tensor, lengths: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Position by position."""
    batch, time, _, heads, _ = qk.shape
    scores = []
    for t in range(time):
        u = qk[:, : t + 1].sum(1) if causal else qk[:, t]
        direction = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        scores.append((direction[..., None, :] @ weights).squeeze(-2))  # (batch, 2, heads, s)
    stacked = torch.stack(scores, 1)
    lengths = torch.full((batch,), time) if lengths is None else lengths
    tokens = (torch.arange(time) < lengths[:, None])[:, :, None, None, None]
    squares = (stacked * tokens).square().sum((1, 2)) / lengths[:, None, None]
    return stacked.transpose(2, 3).reshape(batch, time, heads, -1), squares


def problem(sizes: tuple[int, ...], causal: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """qk, as a linear map would give it, and W, shared by the batch if causal."""
    batch, time, heads, width, rank = sizes
    qk = torch.randn(batch, time, 2 * heads * width).to(dtype).unflatten(-1, (2, heads, width))
    weights = torch.randn(1 if causal else batch, 2, heads, width, rank).bfloat16().float()
    return qk.requires_grad_(), weights.requires_grad_()


def gradients(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores, squares = (torch.randn(t.shape, generator=generator) for t in outputs)
    upstream = [scores.to(dtype).to(outputs[0].dtype), squares.to(outputs[1].dtype)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]


def assert_scores(gpu: ModuleType, qk: Tensor, weights: Tensor, lengths: Tensor | None, causal: bool) -> None:
    """In float32 every number within 1e-5 of the largest; in lower precisions by norm, as mixers are held."""
    found = gradients(gpu.primal_scores(qk, weights, lengths, causal), (qk, weights), qk.dtype)
    exact = qk.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    expected = gradients(by_definition(*exact, lengths, causal), exact, qk.dtype)
    assert [t.dtype for t in found] == [qk.dtype, torch.float32, qk.dtype, torch.float32]
    for one, other in zip(found, expected, strict=True):
        if qk.dtype == torch.float32:
            assert_near(one, other, 1e-5)
        elif other.abs().max() > 1e-9:  # of one channel only the sign counts, so that the gradient is rounding alone
            assert (one.double() - other).norm() <= TOLERANCE[qk.dtype] * other.norm()


@each_direction
@pytest.mark.parametrize("sizes", [(2, 1, 2, 4, 3), (2, 67, 1, 20, 17), (1, 290, 1, 3, 2)], ids=str)
def check_scores(gpu, sizes, causal):
    for lengths in (None, torch.randint(1, sizes[1] + 1, sizes[:1])):
        assert_scores(gpu, *problem(sizes, causal), lengths, causal)


@each_direction
@pytest.mark.parametrize("dtype", LOW_PRECISIONS, ids=str)
def check_precisions(gpu, dtype, causal):
    assert_scores(gpu, *problem((2, 71, 2, 16, 6), causal, dtype), torch.tensor([71, 30]), causal)


@pytest.mark.nightly
@each_direction
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("time", [63, 64, 65, 513, 1100])
@pytest.mark.parametrize(("width", "rank"), [(1, 1), (64, 30), (128, 128)])
def check_many_sizes(gpu, time, width, rank, dtype, causal):
    assert_scores(gpu, *problem((1, time, 1, width, rank), causal, dtype), None, causal)


@each_direction
def check_tokens_of_zeros(gpu, causal):
    """Norms are clamped: scores are 0 and gradients finite."""
    qk, weights = problem((1, 40, 1, 4, 3), causal)
    found = gradients(gpu.primal_scores((0 * qk), weights, None, causal), (qk, weights), qk.dtype)
    assert (found[0] == 0).all()
    assert all(t.isfinite().all() for t in found)


@pytest.mark.nightly
@each_direction
def check_views_and_equal_bits(gpu, causal):
    qk, weights = problem((2, 35, 2, 8, 5), causal)
    turned = qk.detach().permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0).requires_grad_()
    first, *others = (
        gradients(gpu.primal_scores(given, weights, None, causal), (given, weights), qk.dtype)
        for given in (qk, qk, turned)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@each_direction
def check_nothing(gpu, causal):
    qk, weights = problem((0, 5, 2, 4, 3), True)
    scores, squares, d_qk, d_weights = gradients(gpu.primal_scores(qk, weights, None, causal), (qk, weights), qk.dtype)
    assert (scores.shape, squares.shape, d_qk.shape) == ((0, 5, 2, 6), (0, 2, 3), qk.shape)
    assert torch.equal(d_weights, torch.zeros_like(weights))


@pytest.mark.nightly
@each_direction
def check_sound_op(gpu, causal):
    qk, weights = problem((2, 19, 1, 4, 3), causal)
    torch.library.opcheck(torch.ops.subquad.primal_scores.default, (qk, weights, torch.tensor([19, 4]), causal))


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Launch]:
    """Compiles forward and backward, of all tokens with lengths and causal without."""
    from subquad.kernels.primal_scores import gpu

    batch, time, heads, width, rank = sizes
    qk = torch.empty(batch, time, 2, heads, width, dtype=dtype, device="meta")
    with compile_launches(target) as launches:
        for causal in (False, True):
            weights = torch.empty(1 if causal else batch, 2, heads, width, rank, device="meta")
            lengths = None if causal else torch.empty(batch, dtype=torch.int64, device="meta")
            scores, squares, *kept = gpu._forward._init_fn(qk, weights, lengths, causal)
            gpu._backward._init_fn(scores, squares, *kept, qk, weights, lengths, causal)
    for launch in launches:
        assert launch.shared_memory <= TARGETS[target].shared_memory, launch
    return launches


def test_compiles(triton_cache: None) -> None:
    launches = compile_all("sm_80", (8, 2048, 8, 64, 30), torch.bfloat16)
    assert [launch.kernel for launch in launches] == [
        *("project", "score_gradients"),
        *("sum_chunks", "_carry_kernel", "project", "score_gradients", "_carry_kernel", "score_gradients"),
    ]
    for launch in launches:
        assert launch.spilled_bytes == 0, launch
        assert launch.occupancy >= 0.125, launch
        assert launch.tensor_core_instructions > 0 or launch.kernel in ("_carry_kernel", "sum_chunks"), launch


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("sizes", [(8, 2048, 8, 64, 30), (2, 300, 4, 128, 128), (1, 1, 1, 1, 1)], ids=str)
def test_compiles_for_many(target: str, dtype: torch.dtype, sizes: tuple[int, ...], triton_cache: None) -> None:
    for launch in compile_all(target, sizes, dtype):
        if dtype == torch.float32:
            assert "tf32" not in launch.assembly, launch
        elif launch.kernel in ("project", "score_gradients"):
            assert launch.tensor_core_instructions > 0, launch
