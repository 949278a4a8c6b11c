"""The convolution: the CPU kernels and the reference against the definition in float64."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.kernels import conv
from subquad.kernels.conv import cpu, reference
from tests.kernels.memory import poisoned_memory

IMPLEMENTATIONS: dict[str, Any] = {"cpu": cpu, "reference": reference}
both = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


class Shape(NamedTuple):
    batch: int
    size: int
    """Rows of x; more than one segment of the kernels, or less."""
    heads: int
    width: int
    taps: int
    before: int
    length: int
    own: bool

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x, taps and the gradient of y."""
        torch.manual_seed(0)
        channels = self.heads * self.width
        x = torch.randn(self.batch, self.size, channels).to(dtype)
        ahead = (self.batch, self.length) if self.own else ()
        taps = torch.randn(*ahead, self.heads, self.taps).to(torch.float64 if dtype == torch.float64 else torch.float32)
        return x, taps, torch.randn(self.batch, self.length, channels).to(dtype)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    count = draw(st.integers(1, 12) | st.integers(1, 70))
    size = draw(st.integers(1, 12) | st.integers(1, 150))
    before, length = draw(st.integers(0, count - 1)), size
    if size >= count and draw(st.booleans()):  # the streaming form
        before, length = 0, size - count + 1
    width = draw(st.sampled_from([1, 2, 7, 8, 9, 31, 32, 40, 64, 75, 129]))
    return Shape(
        draw(st.integers(1, 3)), size, draw(st.integers(1, 5)), width, count, before, length, draw(st.booleans())
    )


def defined(x: Tensor, taps: Tensor, grad: Tensor, before: int) -> tuple[Tensor, Tensor, Tensor]:
    """y and the gradients of x and taps, from the definition and torch's differentiation, in float64."""
    x, taps = x.double().requires_grad_(), taps.double().requires_grad_()
    heads, count = taps.shape[-2:]
    source = torch.arange(grad.shape[1])[:, None] - before + torch.arange(count)
    inside = (source >= 0) & (source < x.shape[1])
    met = x[:, source.clamp(0, x.shape[1] - 1)] * inside[..., None]  # (B, length, K, C)
    y = torch.einsum("btkhc,bthk->bthc", met.unflatten(-1, (heads, -1)), taps.expand(*grad.shape[:2], heads, count))
    for_x, for_taps = torch.autograd.grad(y.flatten(2), (x, taps), grad.double())
    return y.flatten(2).detach(), for_x, for_taps


def assert_near(value: Tensor, target: Tensor, tolerance: float) -> None:
    """To a fraction of the largest value."""
    assert value.shape == target.shape
    torch.testing.assert_close(value.double(), target, rtol=0, atol=tolerance * target.abs().max().item())


def check(implementation: Any, shape: Shape, dtype: torch.dtype, tolerance: float, tap_tolerance: float) -> None:
    x, taps, grad = shape.tensors(dtype)
    y, x_gradient, tap_gradient = defined(x, taps, grad, shape.before)
    ours = implementation.forward(x, taps, shape.before, shape.length)
    for_x = implementation.input_gradient(grad, taps, shape.before, shape.size)
    for_taps = implementation.tap_gradient(grad, x, shape.before, taps.shape)
    assert (ours.dtype, for_x.dtype, for_taps.dtype) == (dtype, dtype, taps.dtype)
    assert_near(ours, y, tolerance)
    assert_near(for_x, x_gradient, tolerance)
    assert_near(for_taps, tap_gradient, tap_tolerance)


@both
@settings(max_examples=80, deadline=None, derandomize=True)
@given(shape=shapes())
def test_float32(name, shape):
    check(IMPLEMENTATIONS[name], shape, torch.float32, 1e-6, 1e-5)


@both
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shape=shapes(), dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
def test_other_precisions(name, shape, dtype):
    tolerance = 1e-13 if dtype == torch.float64 else 2e-2
    check(IMPLEMENTATIONS[name], shape, dtype, tolerance, tolerance)


@both
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 400), count=st.integers(1, 70), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_softmax(name, rows, count, dtype):
    torch.manual_seed(0)
    logits = (30 * torch.randn(rows, count)).to(dtype)
    logits[torch.rand(rows, count) < 0.2] = float("-inf")
    logits[:, count // 2] = 1.0  # no row is empty
    grad = torch.randn(rows, count, dtype=dtype)
    exact = logits.double().requires_grad_()
    taps = exact.softmax(-1)
    (gradient,) = torch.autograd.grad(taps, exact, grad.double())
    implementation = IMPLEMENTATIONS[name]
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    ours = implementation.softmax(logits)
    assert_near(ours, taps.detach(), tolerance)
    assert ours[logits.isinf()].eq(0).all()
    assert (implementation.softmax_gradient_(grad, ours).double() - gradient).abs().max() <= 4 * tolerance


def test_softmax_spreads_nan():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("-inf")] * 3, [1.0, 2.0, -1e30]])
    torch.testing.assert_close(cpu.softmax(logits), logits.softmax(-1), equal_nan=True)


def test_nan_reaches_only_the_outputs_that_read_it():
    x, taps = torch.ones(1, 20, 16), torch.ones(2, 3)
    x[0, 10] = float("nan")
    assert cpu.forward(x, taps, 2, 20)[0, :, 0].isnan().nonzero().flatten().tolist() == [10, 11, 12]


@pytest.mark.parametrize("width", [8, 64])
def test_stores_around_the_caches_write_the_same(monkeypatch, width):
    x, taps = torch.randn(2, 70, 3 * width), torch.randn(3, 5)
    through = cpu.forward(x, taps, 2, 70)
    monkeypatch.setattr(cpu, "STREAMED_BYTES", 0)
    assert torch.equal(cpu.forward(x, taps, 2, 70), through)


@pytest.mark.parametrize("own", [True, False])
def test_bits_do_not_depend_on_the_run_or_the_threads(own):
    x, taps, grad = Shape(3, 200, 2, 40, 9, 4, 200, own).tensors(torch.float32)

    def results() -> list[Tensor]:
        return [
            cpu.forward(x, taps, 4, 200),
            cpu.input_gradient(grad, taps, 4, 200),
            cpu.tap_gradient(grad, x, 4, taps.shape),
            cpu.softmax(taps),
        ]

    before = torch.get_num_threads()
    first = results()
    try:
        for threads in (1, 2, 2, 2):
            torch.set_num_threads(threads)
            assert all(torch.equal(one, other) for one, other in zip(results(), first, strict=True))
    finally:
        torch.set_num_threads(before)


@both
def test_strided_and_empty_inputs(name):
    implementation = IMPLEMENTATIONS[name]
    x, taps = torch.randn(6, 9, 2).transpose(0, 2), torch.randn(3, 2).t()
    assert torch.equal(
        implementation.forward(x, taps, 1, 9), implementation.forward(x.contiguous(), taps.contiguous(), 1, 9)
    )
    nothing = torch.zeros(0, 9, 6)
    assert implementation.forward(nothing, taps, 1, 9).shape == (0, 9, 6)
    assert implementation.tap_gradient(nothing, nothing, 1, (2, 3)).eq(0).all()


# ---------------------------------------------------------------------- as operations of torch


def test_backward_keeps_the_input_and_the_taps_only() -> None:
    """Unfolding keeps the input once for each tap, which is what the original's plain form does."""
    x, taps, _ = Shape(2, 64, 4, 8, 31, 15, 64, False).tensors(torch.float32)
    x.requires_grad_()
    taps.requires_grad_()
    kept: list[int] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value.numel())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        conv.tap_conv(x, taps, 15, softmax=True)
    assert sum(kept) == x.numel() + taps.numel()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(softmax, own, dtype):
    x, taps, grad = Shape(2, 5, 2, 3, 3, 1, 5, own).tensors(dtype)
    inputs = (x.requires_grad_(), taps.requires_grad_())
    op = conv._softmax_tap_conv if softmax else conv._tap_conv
    torch.library.opcheck(op, (*inputs, 1, 5))
    x, taps = x.detach(), taps.detach()
    if softmax:
        torch.library.opcheck(conv._softmax_gradients, (grad, x, taps, 1))
    else:
        torch.library.opcheck(conv._input_gradient, (grad, taps, 1, 5))
        torch.library.opcheck(conv._tap_gradient, (grad, x, 1, list(taps.shape)))


@pytest.mark.parametrize("own", [True, False])
def test_softmax_inside_the_operation(own):
    x, logits, _ = Shape(2, 6, 2, 3, 4, 1, 6, own).tensors(torch.float64)
    inputs = (x.requires_grad_(), logits.requires_grad_())
    torch.testing.assert_close(conv.tap_conv(*inputs, 1, softmax=True), conv.tap_conv(x, logits.softmax(-1), 1))
    assert torch.autograd.gradcheck(lambda x, logits: conv.tap_conv(x, logits, 1, softmax=True), inputs)
    extended = lambda x, logits: conv.tap_conv_extended(x, logits if not own else logits[:, :3], softmax=True)  # noqa: E731
    assert torch.autograd.gradcheck(extended, inputs)


@pytest.mark.parametrize("softmax", [True, False])
def test_compiles_in_one_graph(softmax):
    torch._dynamo.reset()
    compiled = torch.compile(conv.tap_conv, backend="aot_eager", fullgraph=True, dynamic=True)
    for time in (5, 9):
        x, taps, grad = Shape(2, time, 2, 4, 3, 1, time, True).tensors(torch.float32)
        results = []
        for function in (conv.tap_conv, compiled):
            inputs = (x.clone().requires_grad_(), taps.clone().requires_grad_())
            y = function(*inputs, 1, softmax=softmax)
            results.append([y, *torch.autograd.grad(y, inputs, grad)])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    torch._dynamo.reset()


def test_precisions_under_autocast():
    x, taps, grad = Shape(2, 5, 2, 3, 3, 1, 5, True).tensors(torch.bfloat16)
    inputs = (x.requires_grad_(), taps.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        y = conv.tap_conv(*inputs, 1)
    assert y.dtype == torch.bfloat16
    assert [g.dtype for g in torch.autograd.grad(y, inputs, grad)] == [torch.bfloat16, torch.float32]
    assert_near(y.detach(), defined(x.detach(), taps.detach(), grad, 1)[0], 2e-2)
