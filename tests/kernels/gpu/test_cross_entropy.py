"""The Triton kernel of the cross-entropy of words, in the interpreter against float64, and as compilers see it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.compiling import TARGETS, compile_launches
from tests.kernels.gpu.interpreter import LOW_PRECISIONS, assert_near, needs_triton, tolerance_of

pytestmark = needs_triton

PAD = 1


@pytest.fixture
def cross_entropy(poisoned, monkeypatch):
    """The public function on the GPU's kernel, with chunks of 64 rows."""
    from subquad.kernels.cross_entropy import linear_cross_entropy, reference

    monkeypatch.setenv("SUBQUAD_KERNELS", "gpu")
    monkeypatch.setattr(reference, "LEAST_ROWS", 64)
    monkeypatch.setattr(reference, "CPU_ELEMENTS", 1)
    return linear_cross_entropy


def problem(
    sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32, bias: bool = True, padded: float = 0.3
) -> tuple[list[Tensor], Tensor]:
    """Features (n, C), weight (V, C) and bias (V,), and targets (n,) of which some are padding."""
    count, width, vocab = sizes
    inputs = [torch.randn(count, width), torch.randn(vocab, width), *([torch.randn(vocab)] if bias else [])]
    target = torch.randint(0, vocab, (count,)).masked_fill(torch.rand(count) < padded, PAD)
    return [x.to(dtype).requires_grad_() for x in inputs], target


def by_definition(inputs: list[Tensor], target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    features, weight, *bias = inputs
    log_probs = torch.nn.functional.linear(features, weight, *bias).log_softmax(-1)[target != PAD]
    nll = -log_probs.gather(1, target[target != PAD][:, None]).sum()
    each = smoothing / max(1, weight.shape[0] - 1)
    return (1 - smoothing - each) * nll - each * log_probs.sum(), nll


def assert_agrees(function: Any, inputs: list[Tensor], target: Tensor, smoothing: float, tolerance: float) -> None:
    """Both sums, and the gradients of three times the loss."""
    features, weight, *bias = inputs
    total, nll = function(features, weight, bias[0] if bias else None, target, pad=PAD, smoothing=smoothing)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_nll = by_definition(exact, target, smoothing)
    assert total.dtype == nll.dtype == torch.float32
    assert_near(total, expected, tolerance)
    assert_near(nll, expected_nll, tolerance)
    gradients = torch.autograd.grad(3 * total, inputs)
    for ours, theirs, x in zip(gradients, torch.autograd.grad(3 * expected, exact), inputs, strict=True):
        assert ours.dtype == x.dtype
        assert_near(ours, theirs, tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("sizes", "bias"),
    [
        pytest.param((7, 6, 11), True, id="one chunk"),
        pytest.param((131, 5, 37), False, id="several chunks and no bias"),
        pytest.param((1, 1, 2), True, id="one token"),
        pytest.param((3, 4, 130), True, id="more words than tokens"),
    ],
)
def check_losses(cross_entropy, sizes, bias, smoothing):
    inputs, target = problem(sizes, bias=bias)
    target[0] = 0  # some target counts
    assert_agrees(cross_entropy, inputs, target, smoothing, 1e-5)


def check_vocabularies_in_several_steps(cross_entropy, monkeypatch):
    from subquad.kernels.cross_entropy import gpu

    monkeypatch.setattr(gpu, "MOST_COLUMNS", 16)
    for vocab in (17, 32, 45):
        inputs, target = problem((9, 6, vocab))
        assert_agrees(cross_entropy, inputs, target, 0.1, 1e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISIONS)
def check_half_precision(cross_entropy, dtype):
    inputs, target = problem((70, 8, 37), dtype)
    assert_agrees(cross_entropy, inputs, target, 0.1, tolerance_of(dtype))


@pytest.mark.parametrize("dtype", LOW_PRECISIONS)
def check_autocast(cross_entropy, dtype):
    """Parameters and their gradients stay in float32."""
    inputs, target = problem((70, 8, 37))
    with torch.autocast("cpu", dtype):
        assert_agrees(cross_entropy, inputs, target, 0.1, tolerance_of(dtype))


def check_float16_gradients_are_rounded_after_the_scale(cross_entropy):
    """A loss near 0 has gradients that float16 cannot hold; times a scale it can."""
    features = torch.eye(3).half().mul(18).requires_grad_()
    weight = torch.eye(3).half().requires_grad_()
    target = torch.tensor([0, 2, 2])
    scale = 2.0**12
    total, _ = cross_entropy(features, weight, None, target, pad=PAD)
    found = torch.autograd.grad(total * scale, features)[0]
    exact = features.detach().double().requires_grad_()
    loss, _ = by_definition([exact, weight.detach().double()], target, 0.0)
    expected = torch.autograd.grad(loss * scale, exact)[0]
    assert not (expected[0, 1:] / scale).half().any()
    assert_near(found[0, 1:], expected[0, 1:], 5e-3)


def check_logits_of_any_size(cross_entropy):
    """Large logits neither overflow nor lose the loss of an unlikely word."""
    features = torch.tensor([[900.0, -900.0, 3.0, 0.0], [0.0, 0.0, 0.0, 80.0]], requires_grad=True)
    total, _ = cross_entropy(features, torch.eye(4), None, torch.tensor([2, 0]), pad=PAD)
    assert_near(total, torch.tensor(977.0), 1e-6)
    expected = features.detach().softmax(-1) - torch.nn.functional.one_hot(torch.tensor([2, 0]), 4)
    assert_near(torch.autograd.grad(total, features)[0], expected, 1e-6)


def check_nothing_but_padding(cross_entropy):
    """Not even numbers that are not finite count where a target is padding."""
    for count in (0, 5):
        inputs, target = problem((count, 6, 11), padded=2.0)
        with torch.no_grad():
            inputs[0].fill_(torch.nan)
        total, nll = cross_entropy(*inputs, target, pad=PAD, smoothing=0.1)
        assert (total.item(), nll.item()) == (0, 0)
        for gradient in torch.autograd.grad(total, inputs[::2]):
            assert not gradient.any()


@pytest.mark.parametrize("word", [-3, 11])
def check_targets_that_are_no_words_show(cross_entropy, word):
    """A GPU that refused them would have to be waited for; padding may be such a number."""
    inputs, _ = problem((3, 6, 11))
    total, nll = cross_entropy(*inputs, torch.tensor([2, word, -100]), pad=-100, smoothing=0.1)
    assert total.isnan()
    assert nll.isnan()
    (gradient,) = torch.autograd.grad(total, inputs[0])
    assert gradient.isnan().all(1).tolist() == [False, True, False]


def check_numbers_that_are_not_finite_show(cross_entropy):
    inputs, target = problem((5, 6, 11), padded=0.0)
    target[2] = 3
    with torch.no_grad():
        inputs[0][2, 0] = torch.nan
    total, _ = cross_entropy(*inputs, target, pad=PAD)
    assert total.isnan()


def check_what_is_asked_for_alone_is_computed(cross_entropy):
    inputs, target = problem((9, 6, 11))
    whole, nll = cross_entropy(*inputs, target, pad=PAD)
    expected = torch.autograd.grad(whole, inputs)
    for number in range(3):
        some = [x.detach().requires_grad_(place == number) for place, x in enumerate(inputs)]
        total, _ = cross_entropy(*some, target, pad=PAD)
        assert torch.equal(torch.autograd.grad(total, some[number])[0], expected[number])
    with torch.no_grad():
        total, without = cross_entropy(*inputs, target, pad=PAD)
    assert torch.equal(total, whole)
    assert torch.equal(without, nll)
    assert not nll.requires_grad


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def check_it_is_a_sound_op(cross_entropy, dtype):
    inputs, target = problem((19, 5, 13), dtype)
    torch.library.opcheck(
        torch.ops.subquad.linear_cross_entropy.default, (*inputs, target, PAD, 0.1, dtype, [True, True, True])
    )

    def loss(*inputs: Tensor) -> Tensor:
        return cross_entropy(*inputs, target, pad=PAD, smoothing=0.1)[0]

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours, eager = ([y, *torch.autograd.grad(y, inputs)] for y in (f(*inputs) for f in (compiled, loss)))
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a, b)


def check_equal_inputs_give_equal_bits(cross_entropy):
    inputs, target = problem((70, 8, 37), torch.bfloat16)
    once, twice = (
        torch.autograd.grad(cross_entropy(*inputs, target, pad=PAD, smoothing=0.1)[0], inputs) for _ in range(2)
    )
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a, b)


def check_second_derivatives_are_refused(cross_entropy):
    inputs, target = problem((5, 6, 11))
    total, _ = cross_entropy(*inputs, target, pad=PAD)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(total, inputs, create_graph=True)


# ---------------------------------------------------------------------- compiling


def compile_all(target: str, vocab: int, dtype: torch.dtype) -> None:
    from subquad.kernels.cross_entropy import gpu

    logits = torch.empty(4096, vocab, dtype=dtype, device="meta")
    words = torch.empty(4096, dtype=torch.int64, device="meta")
    losses, bias, scale = (torch.empty(shape, device="meta") for shape in ((2, 4096), (vocab,), ()))
    with compile_launches(target) as launches:
        gpu._row_losses(logits, None, words, None, losses, PAD, 0.1, True)
        gpu._row_losses(logits, bias, words, scale, losses, PAD, 0.1, True)
        gpu._row_losses(logits, None, words, None, losses, PAD, 0.0, False)
    assert [launch.grid for launch in launches] == [(4096,)] * 3
    for launch in launches:
        assert launch.spilled_bytes == 0, launch
        assert launch.occupancy >= 0.5, launch


def test_compiles(triton_cache: None) -> None:
    compile_all("sm_80", 32768, torch.bfloat16)


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [320, 32768, 267744])
def test_compiles_for_many(target: str, dtype: torch.dtype, vocab: int, triton_cache: None) -> None:
    compile_all(target, vocab, dtype)
