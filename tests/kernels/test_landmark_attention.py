"""Fused landmark attention against its plain definition, and LARA with it against LARA without."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.kernels import tiles
from subquad.kernels.landmark_attention import OptWeights, landmark_attention
from subquad.kernels.masking import MASK_VALUE
from subquad.mixers import Mixer, build, noise
from subquad.testing import Case, cases, close, enlarge, tokens
from tests.kernels.memory import poisoned_memory


def by_definition(
    qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, opt: OptWeights | None, mask: Tensor | None
) -> Tensor:
    """The equations as they stand, with whole matrices."""
    scale = qkv.shape[-1] ** -0.5
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    hidden = torch.zeros(qkv.shape[:2], dtype=torch.bool) if mask is None else ~mask
    logits = scale * (w_keys @ k.transpose(-1, -2) - k.square().sum(-1).unsqueeze(-2) / 2)
    logits = logits.masked_fill(hidden[:, None, None], MASK_VALUE)
    u = logits.softmax(-1) @ v
    z = scale * w_queries @ q.transpose(-1, -2) + shared + logits.logsumexp(-1, keepdim=True)
    if opt is not None:
        t = scale * opt.directions @ q.transpose(-1, -2)
        t = t.masked_fill(hidden[:, None, None], MASK_VALUE).softmax(-1)
        mean = (opt.mean_weights[:, None, :, None] * t).sum(2, keepdim=True)
        z = z + (opt.balance + opt.alpha * (t - mean)).clamp(min=1e-8).log()
    return (z.softmax(2).transpose(-1, -2) @ u).transpose(1, 2)


Problem = tuple[Tensor, Tensor, Tensor, Tensor, OptWeights | None, Tensor | None]


@st.composite
def problems(draw: Any, dtype: torch.dtype = torch.float64) -> Problem:
    batch, time, heads = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    count, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    torch.manual_seed(draw(st.integers(0, 999)))

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=dtype, requires_grad=True)

    qkv = random(batch, time, 3, heads, width)
    w_keys, w_queries, directions = (random(batch, heads, count, width) for _ in range(3))
    opt = None
    if draw(st.booleans()):
        mean_weights = torch.rand(draw(st.sampled_from([1, batch])), count, dtype=dtype).softmax(-1)
        # some of the weights end at their least value
        balance = torch.rand(batch, heads, count, 1, dtype=dtype).mul(0.3).requires_grad_()
        opt = OptWeights(directions, balance, mean_weights, draw(st.sampled_from([1.0, 2.5])))
    mask = torch.rand(batch, time) < draw(st.sampled_from([0.1, 0.7])) if draw(st.booleans()) else None
    if mask is not None and dtype == torch.float32:
        # Without any key all u are alike, and what the weights' gradient divides by small weights is rounding alone.
        # Mixers never ask for that.
        mask[:, 0] = True
    return qkv, w_keys, w_queries, random(batch, heads, count, 1), opt, mask


def outputs_and_gradients(function: Any, problem: Problem) -> list[Tensor]:
    y = function(*problem)
    opt = problem[4]
    inputs = [*problem[:4], *([] if opt is None else [opt.directions, opt.balance])]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, inputs, upstream)]


@pytest.mark.parametrize("name", ["cpu", "reference"])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(problem=problems(), tile=st.sampled_from([2**18, 40, 1]))
def test_by_definition(name: str, problem: Problem, tile: int) -> None:
    """Whatever the tiles; every entry is written, none left as it was allocated."""
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setenv("SUBQUAD_KERNELS", name)
        patch.setattr(tiles, "TILE_ELEMENTS", tile)
        ours = outputs_and_gradients(landmark_attention, problem)
        with torch.no_grad():
            untrained = landmark_attention(*problem)
    assert torch.equal(untrained, ours[0])
    for one, other in zip(ours, outputs_and_gradients(by_definition, problem), strict=True):
        assert close(one, other, 1e-10)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=problems(torch.float32))
def test_float32(name: str, problem: Problem) -> None:
    """Against float64, at most 1e-6 of the largest output and 1e-5 of the largest gradient."""

    def exactly(x: Any) -> Any:
        if isinstance(x, OptWeights):
            return OptWeights(*(exactly(part) for part in x))
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    exact = outputs_and_gradients(by_definition, tuple(exactly(x) for x in problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_KERNELS", name)
        ours = outputs_and_gradients(landmark_attention, problem)
    for number, (one, other) in enumerate(zip(ours, exact, strict=True)):
        assert close(one, other, 1e-6 if number == 0 else 1e-5)


def lara(seed: int = 0, **options: Any) -> Mixer:
    torch.manual_seed(seed)
    mixer = build("lara", dim=32, heads=2, landmarks=64, **options)
    enlarge(mixer)
    return mixer


def with_gradients(mixer: Mixer, x: Tensor, padding: Tensor | None = None) -> list[Tensor]:
    """y and the gradients of x and all parameters; draws depend on their shape alone."""

    def draw(kind: noise.Kind, like: Tensor, shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(like)

    x = x.clone().requires_grad_()
    inputs = [x, *(p for name, p in mixer.named_parameters() if "_map" not in name)]
    with noise.drawing_from(draw):
        y = mixer(x, padding=padding).y
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return [y, *torch.autograd.grad(y, inputs, upstream)]


@pytest.mark.parametrize("time", [1, 40, 64, 65, 127, 513, 1025])
@pytest.mark.parametrize("training", [False, True])
def test_lara_in_float32_and_float64(time: int, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64: fused equals plain. float32: 1e-6 of the largest output and 1e-5 of the largest gradient from that.

    The rounding of projections and landmarks alone may move an output further, in the plain form as well: then the
    fused form must stay about as close as that.
    """
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**14)  # of 256 positions
    mixer, x = lara().train(training), tokens(1 if time > 500 else 2, time, 0, 32)
    with poisoned_memory():
        single = with_gradients(mixer, x)
    monkeypatch.setenv("SUBQUAD_KERNELS", "reference")
    plain_single = with_gradients(mixer, x)
    exact = with_gradients(mixer.double(), x.double())
    monkeypatch.delenv("SUBQUAD_KERNELS")
    double = with_gradients(mixer, x.double())
    for number, expected in enumerate(exact):
        assert close(double[number], expected, 1e-10)
        unavoidable = (plain_single[number] - expected).abs().max()
        limit = (1e-6 if number == 0 else 1e-5) * expected.abs().max().clamp(min=1.0)
        assert (single[number] - expected).abs().max() <= torch.maximum(limit, 1.5 * unavoidable)


OPTIONS = [
    {"num_samples": "multi"},
    {"num_samples": "antithetic", "alpha": 2.0},
    {"weights": "bh"},
    {"weights": "biased", "num_samples": "multi"},
    {"proposal": "adaptive"},
    {"proposal": "plain-pool"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lara_with_every_option_and_padding(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = lara(**options).double().train(), tokens(3, 150, 0, 32).double()
    for padding in (None, torch.arange(150) >= torch.tensor([[150], [70], [3]])):
        monkeypatch.delenv("SUBQUAD_KERNELS", raising=False)
        fused = with_gradients(mixer, x, padding)
        monkeypatch.setenv("SUBQUAD_KERNELS", "reference")
        for one, other in zip(fused, with_gradients(mixer, x, padding), strict=True):
            assert close(one, other, 1e-10)


@pytest.mark.parametrize("case", cases("lara"), ids=str)
def test_lara_on_grids(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, padding = case.build(dtype=torch.float64), torch.rand(3, 35) < torch.tensor([[0.0], [0.3], [0.9]])
    for mask in (None, padding):
        results = []
        for forced in ("auto", "reference"):
            monkeypatch.setenv("SUBQUAD_KERNELS", forced)
            x = tokens(3, 35, 0).double().requires_grad_()
            y = mixer(x, padding=mask, grid=(5, 7)).y
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
        for fused, plain in zip(*results, strict=True):
            assert close(fused, plain, 1e-10)


def test_opcheck() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 7, 3, 2, 4, requires_grad=True)
    w_keys, w_queries, directions = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    shared, balance = torch.randn(2, 2, 3, 1, requires_grad=True), torch.rand(2, 2, 3, 1, requires_grad=True)
    mean_weights, mask = torch.full((2, 3), 1 / 3), torch.rand(2, 7) < 0.8
    plain = (qkv, w_keys, w_queries, shared)
    torch.library.opcheck(
        torch.ops.subquad.landmark_attention, (*plain, directions, balance, mean_weights, mask, 1.0, True)
    )
    torch.library.opcheck(torch.ops.subquad.landmark_attention, (*plain, *(None,) * 4, 0.0, True))


def test_gradients_of_some_inputs_only() -> None:
    torch.manual_seed(0)
    qkv, w, shared = torch.randn(1, 9, 3, 2, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 1, requires_grad=True)
    y = landmark_attention(qkv, w, w, shared, None, None)
    (alone,) = torch.autograd.grad(y.sum(), [shared])
    expected = by_definition(qkv, w, w, shared, None, None)
    assert close(alone, torch.autograd.grad(expected.sum(), [shared])[0])
    unused = landmark_attention(qkv, w, w, shared, None, None)
    assert torch.autograd.grad((shared * 2).sum() + 0 * unused.detach().sum(), [shared])[0].eq(2).all()
    u = torch.ops.subquad.landmark_attention(qkv, w, w, shared, None, None, None, None, 0.0, True)[1]
    assert torch.autograd.grad(u.sum(), [shared], allow_unused=True) == (None,)


def test_results_are_bit_deterministic() -> None:
    mixer, x = lara().train(), tokens(2, 700, 0, 32)
    for one, other in zip(with_gradients(mixer, x), with_gradients(mixer, x), strict=True):
        assert torch.equal(one, other)
