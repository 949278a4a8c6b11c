"""The Triton kernels of window attention, in the interpreter against float64, and as compilers see them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from subquad.kernels import dispatch
from subquad.kernels.window_attention import Summaries, Windows, reference, window_attention
from tests.kernels.gpu.compiling import TARGETS, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton

pytestmark = needs_triton


class Case(NamedTuple):
    """bias: the heads that have one of their own, 0 for none; chunk: one number, or one a row."""

    windows: Windows
    batch: int = 1
    heads: int = 1
    width: int = 5
    bias: int = 0
    mask: bool = False
    num_summaries: int = 0
    chunk: int | tuple[int, ...] = 0
    summary_dtype: torch.dtype | None = None
    """The precision of the keys of summaries, where it is another than that of qkv."""


CASES = {
    "one position": Case(Windows((1,), 1), heads=2, width=1),
    "tiles of queries, keys and summaries": Case(
        Windows((70,), 35, 9, 5), width=20, bias=1, mask=True, num_summaries=37
    ),
    "a bias for each head": Case(Windows((12,), 6), batch=2, heads=2, bias=2, mask=True),
    "causal, further back than a window": Case(Windows((9,), 3, 5, 0, causal=True), batch=2, mask=True),
    "causal, chunks": Case(Windows((24,), 12, causal=True), heads=2, width=33, num_summaries=6, chunk=4, mask=True),
    "causal, chunks of a size for each row": Case(
        Windows((18,), 18, causal=True), batch=2, num_summaries=9, chunk=(2, 5)
    ),
    "grid": Case(Windows((4, 6), 2, 1, 2), width=3, bias=1, mask=True),
    "grid, tiles and summaries": Case(Windows((6, 6), 6, 1, 1), heads=2, width=17, bias=1, num_summaries=3),
}
MORE_CASES = {
    "one summary": Case(Windows((7,), 7), num_summaries=1),
    "long": Case(Windows((260,), 130, 65, 65), heads=2, width=64, bias=2, mask=True, num_summaries=70),
    "128 channels": Case(Windows((40,), 20, 10, 10), width=128, bias=1, mask=True, num_summaries=20),
    "causal, tiles": Case(
        Windows((200,), 100, 100, 0, causal=True), width=9, mask=True, num_summaries=20, chunk=10, bias=1
    ),
    "windows of one cell": Case(Windows((3, 2), 1, 1, 1), batch=2, bias=1, num_summaries=2),
    "large squares": Case(Windows((14, 28), 14, 7, 7), width=20, bias=1, mask=True, num_summaries=40),
}


def drawn(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """qkv, keys and values of summaries, bias (those that there are); masks of positions and summaries."""
    windows, axes, cells = case.windows, len(case.windows.shape), torch.Size(case.windows.shape).numel()
    inputs = [torch.randn(case.batch, cells, 3, case.heads, case.width).to(dtype)]
    for kind in (case.summary_dtype or dtype, dtype) if case.num_summaries else ():
        inputs.append(torch.randn(case.batch, case.heads, case.num_summaries, case.width).to(kind))
    if case.bias:
        inputs.append(torch.randn(case.bias, windows.size**axes, windows.keys**axes))
    if not case.mask:
        return inputs, None, None
    mask = torch.rand(case.batch, cells) < 0.7
    mask[:, :: windows.size] = True  # every query sees something
    return inputs, mask, torch.rand(case.batch, case.num_summaries) < 0.7 if case.num_summaries else None


def attend(case: Case, inputs: list[Tensor], masks: Sequence[Tensor | None], kernel: Any) -> Tensor:
    (mask, summary_mask), summaries = masks, None
    if case.num_summaries:
        chunk = case.chunk if isinstance(case.chunk, int) else torch.tensor(case.chunk)[:, None]
        summaries = Summaries(inputs[1], inputs[2], summary_mask, chunk)
    return kernel(inputs[0], case.windows, inputs[-1] if case.bias else None, mask, summaries, 0.0)


def results(case: Case, inputs: list[Tensor], masks: Any, kernel: Any) -> list[Tensor]:
    """y, and the gradients of all inputs."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    y = attend(case, leaves, masks, kernel)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, leaves, upstream)]


def assert_attends(case: Case, dtype: torch.dtype) -> None:
    inputs, *masks = drawn(case, dtype)
    expected = results(case, [one.double() for one in inputs], masks, reference.window_attention)
    found = results(case, inputs, masks, window_attention)
    for one, like, exact in zip(found, (inputs[0], *inputs), expected, strict=True):
        assert one.dtype == like.dtype
        assert_near(one, exact, 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.fixture
def gpu(poisoned, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")


@pytest.mark.parametrize("name", CASES)
def check_float32(gpu, name):
    assert_attends(CASES[name], torch.float32)


@pytest.mark.parametrize("dtype", LOW_PRECISIONS, ids=str)
def check_low_precisions(gpu, dtype):
    """Summaries and biases may be more precise: autocast leaves those to which a norm was applied in float32."""
    case = Case(Windows((10,), 5, 2, 2), width=33, bias=1, mask=True, num_summaries=3, summary_dtype=torch.float32)
    assert_attends(case, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISIONS], ids=str)
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def check_many(gpu, name, dtype):
    assert_attends((CASES | MORE_CASES)[name], dtype)


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 1, 3, 4)])
def check_views(gpu, order):
    """qkv is read where it lies, or copied when its channels do not lie side by side."""
    case = Case(Windows((6,), 3), batch=2, heads=2)
    inputs, *masks = drawn(case, torch.float32)
    view = inputs[0].permute(order).contiguous().permute([order.index(axis) for axis in range(5)])
    assert not view.is_contiguous()
    for one, other in zip(
        results(case, [view], masks, window_attention), results(case, inputs, masks, window_attention), strict=True
    ):
        assert torch.equal(one, other)


def check_nothing(gpu):
    case = CASES["a bias for each head"]._replace(batch=0, num_summaries=2)
    inputs, *masks = drawn(case, torch.float32)
    y, *gradients = results(case, inputs, masks, window_attention)
    assert y.shape == (0, 12, 2, 5)
    assert torch.equal(gradients[-1], torch.zeros_like(inputs[-1]))


def check_queries_that_see_nothing(gpu):
    case = Case(Windows((6,), 3), bias=1, mask=True)
    inputs, *_ = drawn(case, torch.float32)
    mask = torch.tensor([[True, True, False, False, False, False]])
    y, d_qkv, d_bias = results(case, inputs, (mask, None), window_attention)
    assert y[:, :3].all()
    assert not y[:, 3:].any()
    assert not d_qkv[:, 3:].any()
    assert d_bias.isfinite().all()


def check_equal_bits(gpu):
    """Parts of sums are added in the same order each time."""
    case = Case(Windows((36,), 18), bias=1, mask=True, num_summaries=3)
    inputs, *masks = drawn(case, torch.float32)
    first, second = (results(case, inputs, masks, window_attention) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.nightly
def check_is_a_sound_op(gpu):
    case = Case(Windows((6,), 3, 1, 0, causal=True), bias=1, mask=True, num_summaries=2, chunk=3)
    (qkv, k, v, bias), mask, summary_mask = drawn(case, torch.float32)
    leaves = [one.requires_grad_() for one in (qkv, k, v, bias)]
    window_attention(qkv, case.windows)  # imports the operation
    arguments = (*leaves, mask, summary_mask, None, [6], 3, 1, 0, True, 3)
    torch.library.opcheck(torch.ops.subquad.window_attention_gpu.default, arguments)


def check_second_derivatives(gpu):
    """They are those of the reference."""
    case = Case(Windows((4,), 2), num_summaries=2)
    inputs, *masks = drawn(case, torch.float32)
    for leaf in inputs:
        leaf.requires_grad_()
    found = []
    for kernel in (window_attention, reference.window_attention):
        first = torch.autograd.grad(attend(case, inputs, masks, kernel).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad([one.square().sum() for one in first], inputs))
    for ours, plain in zip(*found, strict=True):
        assert_near(ours, plain.double(), 1e-5)


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, case: Case, dtype: torch.dtype) -> None:
    """Compiles forward and backward, and holds every kernel to what it may use."""
    from subquad.kernels.window_attention import gpu

    with torch.device("meta"):
        inputs, *masks = drawn(case, dtype)
        k, v = inputs[1:3] if case.num_summaries else (None, None)
        bias = inputs[-1] if case.bias else None
        y, log_sums = gpu._fake_forward(inputs[0])
    assert isinstance(case.chunk, int)
    shape, *sizes = case.windows
    arguments = (inputs[0], k, v, bias, *masks, None, list(shape), *sizes, case.chunk)
    with compile_launches(target) as launches:
        gpu._forward._init_fn(*arguments)
        gpu._backward._init_fn(y, y, log_sums, *arguments)
    assert len(launches) == 3 + bool(case.num_summaries) + bool(case.bias)
    for launch in launches:
        assert launch.shared_memory <= TARGETS[target].shared_memory, launch
        assert launch.occupancy >= 0.125, launch
        assert "tf32" not in launch.assembly, launch
        if dtype != torch.float32:
            assert launch.tensor_core_instructions > 0, launch
            assert launch.spilled_bytes == 0, launch
        elif case.width <= 64:  # single multiply-adds need more registers
            assert launch.spilled_bytes <= 64, launch


LOCAL = Case(Windows((2048,), 64), batch=8, heads=8, width=64)
CAUSAL_EVA = LOCAL._replace(
    windows=Windows((2048,), 64, causal=True), num_summaries=32, chunk=64, summary_dtype=torch.float32
)
OVERLAP = LOCAL._replace(windows=Windows((2048,), 64, 32, 32), bias=8, mask=True, num_summaries=49)
GRID = LOCAL._replace(windows=Windows((28, 28), 7), bias=8, num_summaries=49)


def test_compiles(triton_cache: None) -> None:
    compile_all("sm_80", CAUSAL_EVA, torch.bfloat16)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [LOCAL, CAUSAL_EVA, OVERLAP, GRID], ids=["local", "causal eva", "overlap", "grid"])
def test_compiles_for_many(target: str, dtype: torch.dtype, case: Case, triton_cache: None) -> None:
    compile_all(target, case, dtype)
