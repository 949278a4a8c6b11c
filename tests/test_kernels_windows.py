"""Fused window attention and chunk values against plain definitions, and against the mixers' unfused form."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.kernels import window_attention as kernel
from subquad.kernels.chunk_values import chunk_values
from subquad.kernels.window_attention import NEVER, Shape, window_attention
from subquad.mixers import available, mixer_class
from subquad.testing import Case, close, every_case, tokens


def attention_by_definition(
    qkv: Tensor,
    far_k: Tensor | None,
    far_v: Tensor | None,
    bias: Tensor | None,
    there: Tensor | None,
    far_exists: Tensor | None,
    shape: Shape,
) -> Tensor:
    """A full matrix of logits, with everything out of reach taken away."""
    time, width = qkv.shape[1], qkv.shape[-1]
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    i, j = torch.arange(time)[:, None], torch.arange(time)
    first = i // shape.window * shape.window - shape.before
    reachable = (j >= first) & (j < first + shape.keys) & ((j <= i) | (not shape.causal))
    reachable = reachable.expand(qkv.shape[0], 1, -1, -1)
    if there is not None:
        reachable = reachable & there[:, None, None, :]
    logits = q @ k.transpose(-1, -2) * width**-0.5
    if bias is not None:
        logits = logits + bias[:, i % shape.window, (j - first).clamp(0, shape.keys - 1)]
    logits = logits.masked_fill(~reachable, NEVER)
    if far_k is None or far_v is None:
        return (logits.softmax(-1) @ v).transpose(1, 2)
    beyond = q @ far_k.transpose(-1, -2) * width**-0.5
    if shape.chunk:
        beyond = beyond.masked_fill(torch.arange(far_k.shape[2]) >= i // shape.chunk, NEVER)
    if far_exists is not None:
        beyond = beyond.masked_fill(~far_exists[:, None, None, :], NEVER)
    return (torch.cat([logits, beyond], -1).softmax(-1) @ torch.cat([v, far_v], 2)).transpose(1, 2)


@st.composite
def problems(draw: Any, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    window, windows, batch = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 7)), draw(st.integers(0, 4))
    time, heads, width = window * windows, 2, 3
    chunk = draw(st.sampled_from([0, *[size for size in range(1, window + 1) if window % size == 0]]))
    shape = Shape(window, before, after, draw(st.booleans()), chunk)
    torch.manual_seed(draw(st.integers(0, 999)))

    def maybe(*sizes: int) -> Tensor | None:
        return torch.randn(*sizes, dtype=dtype, requires_grad=True) if draw(st.booleans()) else None

    qkv = torch.randn(batch, time, 3, heads, width, dtype=dtype, requires_grad=True)
    far = time // chunk if chunk else 3
    far_k = (
        torch.randn(batch, heads, far, width, dtype=dtype, requires_grad=True)
        if chunk
        else maybe(batch, heads, far, width)
    )
    far_v = None if far_k is None else torch.randn_like(far_k).requires_grad_()
    bias = maybe(draw(st.sampled_from([1, heads])), window, shape.keys)
    there = torch.rand(batch, time) < 0.7 if draw(st.booleans()) else None
    if there is not None:
        there[:, ::window] = True
    far_exists = torch.rand(batch, far) < 0.7 if far_k is not None and draw(st.booleans()) else None
    return qkv, far_k, far_v, bias, there, far_exists, shape


def outputs_and_gradients(function: Any, problem: tuple[Any, ...]) -> list[Tensor]:
    y = function(*problem)
    inputs = [t for t in problem[:4] if t is not None]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, inputs, upstream)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([2**20, 40, 1]))
def test_window_attention_by_definition(problem: tuple[Any, ...], tile: int) -> None:
    before, kernel.TILE_ELEMENTS = kernel.TILE_ELEMENTS, tile
    try:
        ours = outputs_and_gradients(window_attention, problem)
    finally:
        kernel.TILE_ELEMENTS = before
    for one, other in zip(ours, outputs_and_gradients(attention_by_definition, problem), strict=True):
        assert close(one, other, 1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problems(torch.float32))
def test_window_attention_in_float32(problem: tuple[Any, ...]) -> None:
    """Against float64, at most 1e-6 of the largest value; every entry is written, none left as it was allocated."""
    with poisoned_memory():
        ours = outputs_and_gradients(window_attention, problem)
    exact = [
        t.detach().double().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in problem
    ]
    for one, other in zip(ours, outputs_and_gradients(attention_by_definition, tuple(exact)), strict=True):
        assert (one - other).abs().max() <= 1e-6 * max(1.0, other.abs().max().item())


class poisoned_memory:  # noqa: N801
    """Within the block, memory that torch.empty gives holds NaN."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(self.before)


def values_by_definition(qkv: Tensor, w: Tensor, there: Tensor | None) -> Tensor:
    chunks, scale = w.shape[2], qkv.shape[-1] ** -0.5
    k, v = (part.transpose(1, 2).unflatten(2, (chunks, -1)) for part in qkv.unbind(2)[1:])
    logits = scale * ((k * w.unsqueeze(3)).sum(-1) - k.square().sum(-1) / 2)
    if there is None:
        return (logits.softmax(-1).unsqueeze(-1) * v).sum(-2)
    mask = there.unflatten(1, (chunks, -1))[:, None]
    return (logits.masked_fill(~mask, NEVER).softmax(-1).mul(mask).unsqueeze(-1) * v).sum(-2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_chunk_values_by_definition(batch: int, chunks: int, cells: int, masked: bool, seed: int) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(batch, chunks * cells, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(batch, 2, chunks, 3, dtype=torch.float64, requires_grad=True)
    there = torch.rand(batch, chunks * cells) < 0.6 if masked else None
    with poisoned_memory():
        ours, definition = chunk_values(qkv, w, there), values_by_definition(qkv, w, there)
        upstream = torch.randn_like(ours)
        gradients = torch.autograd.grad(ours, [qkv, w], upstream), torch.autograd.grad(definition, [qkv, w], upstream)
    assert close(ours, definition, 1e-12)
    for one, other in zip(*gradients, strict=True):
        assert close(one, other, 1e-12)


def test_opcheck() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 8, 3, 2, 4, requires_grad=True)
    far_k, far_v = (torch.randn(2, 2, 4, 4, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, 4, 6, requires_grad=True)
    there, exists = torch.rand(2, 8) < 0.8, torch.rand(2, 4) < 0.8
    arguments = (qkv, far_k, far_v, bias, there, exists, 4, 2, 0, True, 2, True)
    torch.library.opcheck(torch.ops.subquad.window_attention, arguments)
    torch.library.opcheck(torch.ops.subquad.window_attention, (qkv, *(None,) * 5, 4, 0, 0, False, 0, True))
    torch.library.opcheck(torch.ops.subquad.chunk_values, (qkv, far_k, there, True))


FUSED = every_case("local", "eva")


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_the_fused_form_equals_the_plain_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, padding = case.build(), torch.arange(29) >= torch.tensor([[29], [17], [5]])
    for mask in (None, padding):
        results = []
        for forced in ("auto", "reference"):
            monkeypatch.setenv("SUBQUAD_KERNELS", forced)
            x = tokens(3, 29, 0).requires_grad_()
            y = mixer(x, padding=mask).y
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
        for fused, plain in zip(*results, strict=True):
            assert close(fused, plain, 5e-5)


def test_results_are_bit_deterministic() -> None:
    for name in set(available()) & {"local", "eva"}:
        mixer, x = mixer_class(name)(dim=64, heads=4, window=16), tokens(2, 200, 0, 64)
        assert torch.equal(mixer.eval()(x).y, mixer(x).y)
