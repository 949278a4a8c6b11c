"""The Triton kernels of landmark attention, in the interpreter against float64, and as compilers see them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.compiling import TARGETS, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton, tolerance_of

pytestmark = needs_triton

Sizes = tuple[int, int, int, int, int]
"""Batch, time, heads, landmarks, channels of a head."""


def problem(sizes: Sizes, weighted: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """qkv, w, w', b, and f and beta where queries weigh landmarks; some weights end at their least."""
    batch, time, heads, count, width = sizes
    qkv = torch.randn(batch, time, 3, heads, width).to(dtype)
    small = [torch.randn(batch, heads, count, width) for _ in range(3)]
    b, beta = torch.randn(batch, heads, count, 1), torch.rand(batch, heads, count, 1) * 0.3
    return [qkv, small[0], small[1], b, *([small[2], beta] if weighted else [])]


def attend(inputs: list[Tensor], mask: Tensor | None, alpha: float = 1.5) -> Tensor:
    from subquad.kernels.landmark_attention import OptWeights, landmark_attention

    qkv, w, w_queries, b, *rest = inputs
    opt = None
    if rest:
        count = w.shape[2]
        mean_weights = torch.arange(1, count + 1).div(count * (count + 1) / 2).to(w)[None]
        opt = OptWeights(rest[0], rest[1], mean_weights, alpha)
    return landmark_attention(qkv, w, w_queries, b, opt, mask)


def assert_attends(
    monkeypatch: pytest.MonkeyPatch, inputs: list[Tensor], mask: Tensor | None, tolerance: float
) -> list[Tensor]:
    """y and all gradients, which are returned."""
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    y = attend(ours, mask)
    grad = torch.randn(y.shape).to(y.dtype)
    found = [y, *torch.autograd.grad(y, ours, grad)]
    monkeypatch.setenv("SUBQUAD_KERNELS", "reference")
    expected = attend(exact, mask)
    for one, other, given in zip(
        found, [expected, *torch.autograd.grad(expected, exact, grad.double())], [inputs[0], *inputs], strict=True
    ):
        assert one.dtype == given.dtype
        assert_near(one, other, tolerance)
    return found


def some_mask(batch: int, time: int) -> Tensor:
    mask = torch.rand(batch, time) < 0.7
    mask[:, 0] = True
    return mask


@pytest.mark.parametrize(("weighted", "masked"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("sizes", "programs"),
    [
        pytest.param((2, 50, 2, 5, 8), 8, id="some spans"),
        pytest.param((1, 70, 1, 17, 20), 216, id="a span for each tile"),
        pytest.param((2, 37, 3, 2, 3), 1, id="one span"),
    ],
)
def check_attention(poisoned, monkeypatch, sizes, programs, weighted, masked):
    from subquad.kernels.landmark_attention import gpu

    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    mask = some_mask(sizes[0], sizes[1]) if masked else None
    assert_attends(monkeypatch, problem(sizes, weighted), mask, 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(2, 300, 2, 49, 64), (1, 130, 1, 98, 64), (1, 65, 2, 33, 128)])
def check_attention_of_many_sizes(poisoned, monkeypatch, sizes, weighted):
    for mask in (None, some_mask(sizes[0], sizes[1])):
        assert_attends(monkeypatch, problem(sizes, weighted), mask, 1e-5)


def check_one_position(poisoned, monkeypatch):
    """y is the value there, whatever the landmarks say."""
    inputs = problem((2, 1, 2, 3, 4), weighted=True)
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    assert_near(attend(inputs, None), inputs[0][:, :, 2].double(), 1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", LOW_PRECISIONS)
def check_half_precision(poisoned, monkeypatch, dtype, weighted):
    inputs = problem((2, 70, 2, 9, 12), weighted, dtype)
    assert_attends(monkeypatch, inputs, some_mask(2, 70), 1.5 * tolerance_of(dtype))


def check_what_is_hidden_is_not_read(poisoned, monkeypatch):
    """Keys and values that the mask hides have no influence; nor have they gradients."""
    inputs, mask = problem((2, 50, 2, 5, 8), weighted=True), torch.arange(50) < torch.tensor([[50], [33]])
    found = assert_attends(monkeypatch, inputs, mask, 1e-5)
    inputs[0][1, 33:, 1:] = 7.0
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    assert torch.equal(attend(inputs, mask)[:, :33], found[0][:, :33])
    assert not found[1][1, 33:, 1:].any()


def check_views_are_read_in_place(poisoned, monkeypatch):
    inputs = problem((2, 40, 2, 5, 8), weighted=True)
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    plain = attend(inputs, None)
    views = [
        torch.stack([inputs[0]] * 2, 2)[:, :, 1],
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[1:]),
    ]
    assert not any(x.is_contiguous() for x in views[:3])
    assert torch.equal(attend(views, None), plain)


@pytest.mark.nightly
def check_a_sound_op(poisoned, monkeypatch):
    """For torch.library, torch.compile, second derivatives, no rows at all; and equal inputs give equal bits."""
    from subquad.kernels.landmark_attention import gpu

    inputs = [x.requires_grad_() for x in problem((2, 37, 1, 3, 4), weighted=True)]
    mean_weights, mask = torch.full((2, 3), 1 / 3), some_mask(2, 37)
    torch.library.opcheck(gpu._forward, (*inputs, mean_weights, mask, 1.0))
    torch.library.opcheck(gpu._forward, (*inputs[:4], None, None, None, None, 0.0))
    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    compiled: Any = torch.compile(attend, backend="aot_eager", fullgraph=True)
    ours, eager, again = (
        [y, *torch.autograd.grad(y.square().sum(), inputs)]
        for y in (f(inputs, mask) for f in (compiled, attend, attend))
    )
    for a, b, c in zip(ours, eager, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    (once,) = torch.autograd.grad(attend(inputs, mask).square().sum(), inputs[1], create_graph=True)
    assert torch.autograd.grad(once.sum(), inputs[1])[0].isfinite().all()
    empty = [x.detach()[:0].requires_grad_() for x in inputs]
    y = attend(empty, mask[:0])
    assert y.shape == (0, 37, 1, 4)
    assert all(g.numel() == 0 for g in torch.autograd.grad(y.sum(), empty))


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, sizes: Sizes, dtype: torch.dtype, weighted: bool, masked: bool) -> None:
    """float32 with TF32, as training has it: without it, registers are too few for products of single numbers."""
    from subquad.kernels.landmark_attention import gpu

    batch, time, heads, count, width = sizes

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv, w = empty(batch, time, 3, heads, width, dtype=dtype), empty(batch, heads, count, width)
    b = empty(batch, heads, count, 1)
    opt = (w, b, empty(1, count)) if weighted else (None, None, None)
    inputs = (qkv, w, w, b, *opt, empty(batch, time, dtype=torch.bool) if masked else None, 1.0)
    with compile_launches(target) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "dot_precision", lambda: "tf32")
        y, u, log_sums = gpu._forward._init_fn(*inputs)
        gpu._backward._init_fn(y, u, log_sums, *inputs)
    assert len(launches) == 6
    for launch in launches:
        # for sm_100 the compiler stops at 128 registers, for a fourth program, and puts two or four more into memory
        assert launch.spilled_bytes <= (16 if target == "sm_100" else 0), launch
        assert launch.shared_memory <= TARGETS["sm_86"].shared_memory, launch
        assert launch.occupancy >= 0.125, launch
        assert (launch.tensor_core_instructions > 0) == (launch.kernel != "combine"), launch


def test_compiles(triton_cache: None) -> None:
    compile_all("sm_80", (8, 2048, 8, 49, 64), torch.bfloat16, weighted=True, masked=False)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((8, 2048, 8, 49, 64), torch.bfloat16),
        ((32, 512, 8, 49, 64), torch.float16),
        ((8, 2048, 8, 16, 64), torch.bfloat16),
        ((64, 196, 3, 49, 64), torch.float32),
        ((2, 1, 1, 1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_compiles_for_many(target: str, sizes: Sizes, dtype: torch.dtype, triton_cache: None) -> None:
    for weighted, masked in ((True, True), (False, False)):
        compile_all(target, sizes, dtype, weighted, masked)
