"""Fused attention through exponential features against its definition, and against the mixer's explicit form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.kernels import tiles
from subquad.kernels.feature_attention import feature_attention
from subquad.mixers import Mixer, build
from subquad.testing import close, enlarge
from tests.kernels.memory import poisoned_memory

EPS = 1e-4
LENGTHS = [1, 2, 63, 513, 1025]
directions = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def log_scales(y: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Of scores (2, batch, heads, time, m): each query's own largest, and that of all keys that it sees."""
    query, key = y.detach().amax(-1)
    key = key if mask is None else key.masked_fill(~mask[:, None], -1e30)
    seen = key.cummax(-1).values if causal else key.amax(-1, keepdim=True).expand_as(key)
    return torch.stack([query, seen])


def fused(qkv: Tensor, matrix: Tensor, mask: Tensor | None, least: float, causal: bool = False) -> Tensor:
    return feature_attention(qkv, matrix, mask, EPS, least, causal=causal)


def by_definition(qkv: Tensor, matrix: Tensor, mask: Tensor | None, least: float, causal: bool = False) -> Tensor:
    """Every pair of query and key."""
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    t = torch.stack([q, k]) * qkv.shape[-1] ** -0.25
    y = t @ matrix.transpose(-1, -2)
    c = t.square().sum(-1, keepdim=True) / 2
    query_scale, key_scale = log_scales(y, mask, causal)
    phi_q = (y[0] - c[0] - query_scale[..., None]).exp() * matrix.shape[1] ** -0.5 + EPS
    exponent = y[1] - c[1] - key_scale[..., None]
    if mask is not None:
        exponent = exponent.masked_fill(~mask[:, None, :, None], -torch.inf)
    phi_k = exponent.exp() * matrix.shape[1] ** -0.5
    change = (key_scale[..., None, :] - key_scale[..., None]).clamp(max=0).exp()  # from a key's scale to the query's
    weights = (phi_q @ phi_k.transpose(-1, -2)) * change + EPS * phi_q.sum(-1, keepdim=True)
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None, None, :], 0)
    weights = weights.tril() if causal else weights
    return (weights @ v / weights.sum(-1, keepdim=True).clamp(min=least)).transpose(1, 2)


def problem(time: int, batch: int = 2, padded: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    torch.manual_seed(time)
    qkv = torch.randn(batch, time, 3, 2, 4, dtype=dtype, requires_grad=True)
    matrix = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
    mask = torch.arange(time) < torch.randint(1, time + 1, (batch, 1)) if padded else None
    return qkv, matrix, mask


def output_and_gradients(function: Any, inputs: tuple[Any, ...], least: float, causal: bool = False) -> list[Tensor]:
    qkv, matrix, mask = inputs
    y = function(qkv, matrix, mask, least, causal)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, [qkv, matrix], upstream)]


@directions
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("name", "tile"), [("cpu", 2**18), ("cpu", 300), ("reference", 0)])
@pytest.mark.parametrize("time", LENGTHS)
def test_by_definition(
    time: int, name: str, tile: int, padded: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with clamps that some divisors fall below and others not; every entry is written."""
    monkeypatch.setenv("SUBQUAD_KERNELS", name)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile)
    inputs = problem(time, padded=padded)
    for least in (1e-2, 0.1):
        with poisoned_memory():
            ours = output_and_gradients(fused, inputs, least, causal)
        for one, other in zip(ours, output_and_gradients(by_definition, inputs, least, causal), strict=True):
            assert close(one, other, 1e-12)


@directions
@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("time", LENGTHS)
def test_in_float32(time: int, name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, at most 1e-6 of the largest value; for W, whose gradient sums over all tokens, 2e-6.

    The definition itself, computed in float32, is 1.4e-6 off in W's gradient at 1025 tokens.
    """
    monkeypatch.setenv("SUBQUAD_KERNELS", name)
    qkv, matrix, mask = problem(time, padded=True, dtype=torch.float32)
    exact = (t.detach().double().requires_grad_() for t in (qkv, matrix))
    ours = output_and_gradients(fused, (qkv, matrix, mask), 1e-2, causal)
    expected = output_and_gradients(by_definition, (*exact, mask), 1e-2, causal)
    for one, other, bound in zip(ours, expected, (1e-6, 1e-6, 2e-6), strict=True):
        assert (one - other).abs().max() <= bound * max(1.0, other.abs().max().item())


@directions
def test_many_short_rows_share_a_tile(causal: bool) -> None:
    inputs = problem(3, batch=7, padded=True)
    ours = output_and_gradients(fused, inputs, 1e-2, causal)
    for one, other in zip(ours, output_and_gradients(by_definition, inputs, 1e-2, causal), strict=True):
        assert close(one, other, 1e-12)


@directions
def test_what_is_not_needed_gets_no_gradient(causal: bool) -> None:
    qkv, matrix, _ = problem(9)
    fixed = matrix.detach()
    (alone,) = torch.autograd.grad(fused(qkv, fixed, None, 1e-2, causal).sum(), [qkv])
    together, _ = torch.autograd.grad(fused(qkv, matrix, None, 1e-2, causal).sum(), [qkv, matrix])
    assert torch.equal(alone, together)
    unused = fused(qkv, matrix, None, 1e-2, causal)
    assert torch.autograd.grad((qkv.sum() + 0 * unused.detach().sum()), [matrix], allow_unused=True) == (None,)
    with torch.no_grad():
        assert torch.equal(fused(qkv, matrix, None, 1e-2, causal), unused)


@directions
def test_absent_keys_may_hold_anything_finite(causal: bool) -> None:
    """Their exponentials would overflow."""
    qkv, matrix, _ = problem(6, dtype=torch.float32)
    mask = (torch.arange(6) < 4).expand(2, -1)
    wild = torch.where(mask[:, :, None, None, None], qkv, 30.0).detach().requires_grad_()
    y, d_qkv, d_matrix = output_and_gradients(fused, (wild, matrix, mask), 1e-2, causal)
    assert y.isfinite().all()
    assert d_qkv.isfinite().all()
    assert d_matrix.isfinite().all()
    assert (d_qkv[:, 4:, 1:] == 0).all()


def test_opcheck() -> None:
    for padded in (False, True):
        qkv, matrix, mask = problem(7, padded=padded, dtype=torch.float32)
        y, c, log_scale = torch.ops.subquad.feature_scores(qkv.detach(), matrix.detach())
        torch.library.opcheck(torch.ops.subquad.feature_scores, (qkv.detach(), matrix.detach()))
        shift = -c - log_scales(y, mask, causal=False)
        torch.library.opcheck(torch.ops.subquad.feature_attention, (qkv, matrix, y, shift, mask, EPS, 1e-2, True))
        given = qkv, matrix, y, c, log_scale, mask, EPS, 1e-2, True
        torch.library.opcheck(torch.ops.subquad.causal_feature_attention, given)
        assert torch.equal(log_scale, y.amax(-1))


def favorp(**options: object) -> Mixer:
    torch.manual_seed(0)
    mixer = build("performer", dim=16, heads=4, features=8, **options)
    enlarge(mixer)
    return mixer


@pytest.mark.parametrize("scheme", ["learnable", "fixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_fused_form_equals_the_explicit_one(
    scheme: str, dtype: torch.dtype, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer = favorp(projection=scheme).to(dtype)
    padding = torch.arange(513) >= torch.tensor([[513], [100], [0]]) if padded else None
    results = []
    for forced in ("auto", "reference"):
        monkeypatch.setenv("SUBQUAD_KERNELS", forced)
        x = torch.randn(3, 513, 16, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        y = mixer(x, padding=padding).y
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
    for one, other in zip(*results, strict=True):
        assert close(one, other, 1e-12 if dtype == torch.float64 else 5e-5)


def test_compiles_whole_and_repeats_itself() -> None:
    mixer = favorp(projection="learnable")
    x = torch.randn(2, 65, 16, requires_grad=True)

    def results(call: Any) -> list[Tensor]:
        y = call(x).y
        return [y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])]

    first, second = results(mixer), results(mixer)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    compiled = results(torch.compile(mixer, fullgraph=True, backend="aot_eager"))
    assert all(close(one, other, 1e-5) for one, other in zip(compiled, first, strict=True))
