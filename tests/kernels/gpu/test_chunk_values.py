"""The Triton kernels of values and means of chunks, in the interpreter against float64, and as compilers see them."""

import pytest
import torch
from torch import Tensor

from subquad.kernels import dispatch
from subquad.kernels.chunk_values import chunk_means, chunk_values, reference
from subquad.kernels.window_attention import Summaries, Windows, window_attention
from subquad.mixers import build
from tests.kernels.gpu.compiling import TARGETS, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton

pytestmark = needs_triton


@pytest.fixture
def gpu(poisoned, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")


def drawn(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """qkv and w; the latter in float32, as autocast leaves it after a norm."""
    batch, time, heads, width, chunks = sizes
    return [torch.randn(batch, time, 3, heads, width).to(dtype), torch.randn(batch, heads, chunks, width)]


def results(inputs: list[Tensor], mask: Tensor | None, size: int | Tensor, kernel: object) -> list[Tensor]:
    """Values and means, and the gradients of qkv and w through both and through a third use of qkv."""
    qkv, w = (one.detach().requires_grad_() for one in inputs)
    divisors = torch.arange(1, w.shape[2] + 1)[None]
    passed_on, *both = kernel.chunk_means(qkv, mask, size, divisors)  # type: ignore[attr-defined]
    means = torch.stack(both)
    passed_on, u = kernel.chunk_values(passed_on, w, mask, size)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(one.shape, generator=generator).to(one) for one in (passed_on, means, u)]
    total = sum((one * weight).double().sum() for one, weight in zip((passed_on, means, u), weights, strict=True))
    assert isinstance(total, Tensor)
    return [u, means, *torch.autograd.grad(total, [qkv, w])]


class Public:
    chunk_means, chunk_values = staticmethod(chunk_means), staticmethod(chunk_values)


def assert_chunks(sizes: tuple[int, ...], size: int | Tensor, dtype: torch.dtype, masked: bool) -> None:
    inputs = drawn(sizes, dtype)
    mask = torch.rand(sizes[:2]) < 0.6 if masked else None
    expected = results([one.double() for one in inputs], mask, size, reference)
    found = results(inputs, mask, size, Public)
    for one, exact, like in zip(found, expected, (dtype, dtype, dtype, torch.float32), strict=True):
        assert one.dtype == like
        assert_near(one, exact, 1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        pytest.param((2, 1, 2, 1, 1), 1, id="one position"),
        pytest.param((1, 150, 1, 33, 2), 75, id="tiles"),
        pytest.param((1, 10, 1, 5, 4), 3, id="a short last chunk"),
        pytest.param((1, 10, 2, 5, 2), 3, id="positions in no chunk"),
        pytest.param((1, 4, 1, 5, 3), 3, id="an empty chunk"),
        pytest.param((2, 11, 1, 6, 4), torch.tensor([3, 5]), id="a size for each row"),
    ],
)
def check_float32(gpu, sizes, size, masked):
    assert_chunks(sizes, size, torch.float32, masked)


@pytest.mark.parametrize("dtype", LOW_PRECISIONS, ids=str)
def check_low_precisions(gpu, dtype):
    assert_chunks((1, 13, 2, 20, 3), 5, dtype, True)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("width", [1, 64, 128, 200])
@pytest.mark.parametrize("size", [1, 64, 65, 129])
def check_many(gpu, size, width, dtype):
    assert_chunks((2, 200, 2, width, -(-200 // size) if size > 1 else 3), size, dtype, True)


def check_views(gpu):
    qkv, w = drawn((2, 9, 2, 5, 3), torch.float32)
    view, w_view = qkv.transpose(1, 4).contiguous().transpose(1, 4), w.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    found = results([view, w_view], None, 3, Public)
    for one, other in zip(found, results([qkv, w], None, 3, Public), strict=True):
        assert torch.equal(one, other)


def check_nothing(gpu):
    for one in results(drawn((0, 9, 2, 5, 3), torch.float32), None, 3, Public):
        assert one.numel() == 0


def check_second_derivatives(gpu):
    """They are those of the reference."""
    qkv, w = (one.requires_grad_() for one in drawn((1, 6, 1, 3, 2), torch.float32))
    found = []
    for kernel in (Public, reference):
        passed_on, means, _ = kernel.chunk_means(qkv, None, 3, torch.full((1, 2), 3))
        passed_on, u = kernel.chunk_values(passed_on, w, None, 3)
        total = u.square().sum() + means.square().sum() + passed_on.square().sum()
        first = torch.autograd.grad(total, [qkv, w], create_graph=True)
        found.append(torch.autograd.grad([one.square().sum() for one in first], [qkv, w]))
    for ours, plain in zip(*found, strict=True):
        assert_near(ours, plain.double(), 1e-5)


def check_compiled(gpu):
    """Gradients that are added in place are those of eager code."""

    def attend(qkv: Tensor, w: Tensor) -> Tensor:
        qkv, means, _ = chunk_means(qkv, None, 3, torch.full((1, 2), 3))
        qkv, u = chunk_values(qkv, w, None, 3)
        return window_attention(qkv, Windows((6,), 3), summaries=Summaries(means, u))

    qkv, w = (one.requires_grad_() for one in drawn((1, 6, 1, 3, 2), torch.float32))
    compiled, eager = (
        [y, *torch.autograd.grad(y.square().sum(), [qkv, w])]
        for y in (f(qkv, w) for f in (torch.compile(attend, backend="aot_eager", fullgraph=True), attend))
    )
    for one, other in zip(compiled, eager, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "padded"),
    [
        pytest.param({"landmarks": 3}, False, id="landmarks"),
        pytest.param({"landmarks": 3}, True, id="landmarks, padded"),
        pytest.param({"chunk_size": 2, "causal": True}, True, id="causal, padded"),
    ],
)
def check_eva(gpu, options, padded, monkeypatch):
    """The mixer with these kernels: y and the gradients of x and of all parameters."""
    mixer = build("eva", dim=6, heads=2, window=4, **options).eval()
    x = torch.randn(2, 9, 6, requires_grad=True)
    padding = torch.arange(9) >= torch.tensor([[9], [5]]) if padded else None
    learned = [x, *mixer.parameters()]
    found = []
    for kernels in ("gpu", "reference"):
        monkeypatch.setenv(dispatch.VARIABLE, kernels)
        y = mixer(x, padding=padding).y
        found.append([y, *torch.autograd.grad(y.square().sum(), learned)])
    for ours, plain in zip(*found, strict=True):
        assert (ours - plain).abs().max() <= 1e-5 * max(1e-2, plain.abs().max().item())


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, width: int, size: int, dtype: torch.dtype, occupancy: float) -> None:
    from subquad.kernels.chunk_values import gpu

    with torch.device("meta"):
        chunks = 2048 // size
        qkv, w = torch.empty(8, 2048, 3, 8, width, dtype=dtype), torch.empty(8, 8, chunks, width)
        mask, divisors = torch.empty(8, 2048, dtype=torch.bool), torch.empty(1, chunks, dtype=torch.int64)
        with compile_launches(target) as launches:
            u, log_sums = gpu._average._init_fn(qkv, w, mask, None, size)
            gpu._add_gradients._init_fn(qkv, u, qkv, w, u, log_sums, mask, None, size)
            means = gpu._mean._init_fn(qkv, mask, None, size, divisors)
            gpu._add_to_members._init_fn(qkv, *means, mask, None, size, divisors)
    assert len(launches) == 4
    for launch in launches:
        assert launch.spilled_bytes == 0, launch
        assert launch.shared_memory <= TARGETS[target].shared_memory, launch
        assert launch.occupancy >= occupancy, launch


def test_compiles(triton_cache: None) -> None:
    compile_all("sm_80", 64, 64, torch.bfloat16, 0.25)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "size"), [(64, 64), (40, 128), (128, 16)])
def test_compiles_for_many(target: str, dtype: torch.dtype, width: int, size: int, triton_cache: None) -> None:
    compile_all(target, width, size, dtype, 0.125)
