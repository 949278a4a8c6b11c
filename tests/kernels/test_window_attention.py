"""Window attention: both implementations against a full matrix of logits, and mixers with each of them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.kernels.dispatch import VARIABLE
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.window_attention import Summaries, Windows, cpu, window_attention
from subquad.mixers import available, mixer_class
from subquad.testing import Case, close, every_case, tokens
from tests.kernels.memory import poisoned_memory

Problem = tuple[Tensor, Windows, Tensor | None, Tensor | None, Summaries | None]
IMPLEMENTATIONS = ["reference", "cpu"]


def attention_by_definition(
    qkv: Tensor, windows: Windows, bias: Tensor | None, mask: Tensor | None, summaries: Summaries | None
) -> Tensor:
    """A full matrix of logits, with everything out of sight taken away."""
    time, width = qkv.shape[1], qkv.shape[-1]
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    i, j = torch.arange(time)[:, None], torch.arange(time)
    first = i // windows.size * windows.size - windows.look_back
    seen = (j >= first) & (j < first + windows.keys) & ((j <= i) | (not windows.causal))
    seen = seen.expand(qkv.shape[0], 1, -1, -1)
    if mask is not None:
        seen = seen & mask[:, None, None, :]
    logits = q @ k.transpose(-1, -2) * width**-0.5
    if bias is not None:
        logits = logits + bias[:, i % windows.size, (j - first).clamp(0, windows.keys - 1)]
    logits = logits.masked_fill(~seen, MASK_VALUE)
    if summaries is None:
        return (logits.softmax(-1) @ v).transpose(1, 2)
    beyond = q @ summaries.k.transpose(-1, -2) * width**-0.5
    if summaries.chunk:
        beyond = beyond.masked_fill(torch.arange(summaries.k.shape[2]) >= i // summaries.chunk, MASK_VALUE)
    if summaries.mask is not None:
        beyond = beyond.masked_fill(~summaries.mask[:, None, None, :], MASK_VALUE)
    return (torch.cat([logits, beyond], -1).softmax(-1) @ torch.cat([v, summaries.v], 2)).transpose(1, 2)


@st.composite
def problems(draw: Any, dtype: torch.dtype = torch.float64) -> Problem:
    size, count, batch = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    time, heads, width = size * count, 2, 3
    windows = Windows((time,), size, draw(st.integers(0, 7)), draw(st.integers(0, 4)), draw(st.booleans()))
    chunk = draw(st.sampled_from([0, *[length for length in range(1, size + 1) if size % length == 0]]))
    torch.manual_seed(draw(st.integers(0, 999)))

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=dtype, requires_grad=True)

    qkv = random(batch, time, 3, heads, width)
    summaries = None
    if chunk or draw(st.booleans()):
        number = time // chunk if chunk else 3
        exist = torch.rand(batch, number) < 0.7 if draw(st.booleans()) else None
        summaries = Summaries(random(batch, heads, number, width), random(batch, heads, number, width), exist, chunk)
    bias = random(draw(st.sampled_from([1, heads])), size, windows.keys) if draw(st.booleans()) else None
    mask = torch.rand(batch, time) < 0.7 if draw(st.booleans()) else None
    if mask is not None:
        mask[:, ::size] = True
    return qkv, windows, bias, mask, summaries


def outputs_and_gradients(function: Any, problem: Problem) -> list[Tensor]:
    y = function(*problem)
    qkv, _, bias, _, summaries = problem
    inputs = [t for t in (qkv, bias, *(summaries or ())[:2]) if t is not None]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, inputs, upstream)]


def exactly(problem: Problem) -> Problem:
    """The same in float64."""
    qkv, windows, bias, mask, summaries = problem

    def double(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_()

    if summaries is not None:
        summaries = Summaries(double(summaries.k), double(summaries.v), *summaries[2:])
    return double(qkv), windows, None if bias is None else double(bias), mask, summaries


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems(), tile=st.sampled_from([2**20, 40, 1]))
def test_by_definition(name: str, problem: Problem, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, name)
        patch.setattr(cpu, "TILE_ELEMENTS", tile)
        ours = outputs_and_gradients(window_attention, problem)
    for one, other in zip(ours, outputs_and_gradients(attention_by_definition, problem), strict=True):
        assert close(one, other, 1e-12)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=problems(torch.float32))
def test_in_float32(name: str, problem: Problem) -> None:
    """Against float64, at most 1e-6 of the largest value; every entry is written, none left as it was allocated."""
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setenv(VARIABLE, name)
        ours = outputs_and_gradients(window_attention, problem)
    for one, other in zip(ours, outputs_and_gradients(attention_by_definition, exactly(problem)), strict=True):
        assert (one - other).abs().max() <= 1e-6 * max(1.0, other.abs().max().item())


def test_chunks_of_a_size_for_each_row() -> None:
    torch.manual_seed(0)
    qkv, windows = torch.randn(2, 12, 3, 2, 3), Windows((12,), 4, causal=True)
    k, v, sizes = torch.randn(2, 2, 6, 3), torch.randn(2, 2, 6, 3), [2, 3]
    y = window_attention(qkv, windows, summaries=Summaries(k, v, None, torch.tensor(sizes)[:, None]))
    for row, size in enumerate(sizes):
        here = slice(row, row + 1)
        alone = window_attention(qkv[here], windows, summaries=Summaries(k[here], v[here], None, size))
        assert close(y[here], alone, 1e-6)


def test_dropout_is_of_the_probabilities() -> None:
    """Without a bias and with equal logits every output is a sum of kept values, each scaled by the same factor."""
    torch.manual_seed(0)
    qkv = torch.zeros(1, 200, 3, 1, 1)
    qkv[:, :, 2] = 1
    y = window_attention(qkv, Windows((200,), 4), dropout=0.5).flatten()
    assert sorted(set(y.tolist())) == [0, 0.5, 1, 1.5, 2]
    assert abs(y.mean() - 1) < 0.2


def test_opcheck() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 8, 3, 2, 4, requires_grad=True)
    far_k, far_v = (torch.randn(2, 2, 4, 4, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, 4, 6, requires_grad=True)
    there, exists = torch.rand(2, 8) < 0.8, torch.rand(2, 4) < 0.8
    arguments = (qkv, far_k, far_v, bias, there, exists, 4, 2, 0, True, 2, True)
    torch.library.opcheck(torch.ops.subquad.window_attention, arguments)
    torch.library.opcheck(torch.ops.subquad.window_attention, (qkv, *(None,) * 5, 4, 0, 0, False, 0, True))


FUSED = every_case("local", "eva")


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_the_fused_form_equals_the_plain_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, padding = case.build(), torch.arange(29) >= torch.tensor([[29], [17], [5]])
    for mask in (None, padding):
        results = []
        for forced in ("auto", "reference"):
            monkeypatch.setenv(VARIABLE, forced)
            x = tokens(3, 29, 0).requires_grad_()
            y = mixer(x, padding=mask).y
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
        for fused, plain in zip(*results, strict=True):
            assert close(fused, plain, 5e-5)


def test_results_are_bit_deterministic() -> None:
    for name in set(available()) & {"local", "eva"}:
        mixer, x = mixer_class(name)(dim=64, heads=4, window=16), tokens(2, 200, 0, 64)
        assert torch.equal(mixer.eval()(x).y, mixer(x).y)
