"""Performer: what its features estimate, how its causal form relates to the other one, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import build, noise
from subquad.testing import close, enlarge, tokens

MAPS = [
    {"feature_map": "favorp", "features": 8},
    {"feature_map": "relu", "features": 8},
    {"feature_map": "fourier", "features": 8},
    {"feature_map": "dpfp", "features": 16},
    {"feature_map": "mlp-fourier", "features": 8},
    {"feature_map": "relu-only"},
    {"feature_map": "sigmoid-only"},
]


def performer(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    mixer = build("performer", **{"dim": 16, "heads": 4} | options)
    enlarge(mixer)
    return mixer.to(dtype).eval()


def test_favorp_approaches_softmax_like_one_over_the_root_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """With independent rows, as training draws them, and small norms: with large ones the constants take over."""
    torch.manual_seed(0)
    q, k, v = (size * torch.randn(1, 1, 24, 8, dtype=torch.float64) for size in (0.2, 0.2, 1.0))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    counts, errors = (16, 64, 256, 1024), []
    for count in counts:
        squares = []
        for _ in range(30):
            mixer = build("performer", dim=8, heads=1, features=count).double()
            monkeypatch.setattr(mixer.qkv, "forward", lambda x: torch.cat([q, k, v], -1)[:, 0])
            monkeypatch.setattr(mixer, "project_out", lambda heads: heads.transpose(1, 2))
            y = mixer.train()(torch.zeros(1, 24, 8, dtype=torch.float64)).y
            squares.append((y - exact).square().mean())
        errors.append(torch.stack(squares).mean().sqrt().item())
    logs = torch.tensor([counts, errors], dtype=torch.float64).log()
    centred = logs - logs.mean(1, keepdim=True)
    slope = (centred[0] * centred[1]).sum() / centred[0].square().sum()
    assert -0.65 < slope < -0.35, (slope, errors)


@pytest.mark.parametrize("causal", [False, True])
def test_more_features_are_nearer_to_trained_attention_with_a_small_normaliser_only(causal: bool) -> None:
    """The maxima of more features are larger, so that sums relative to them fall below the usual normaliser."""
    torch.manual_seed(0)
    q, k, v = (size * torch.randn(2, 1, 65, 16) for size in (0.6, 0.6, 1.0))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def error(**options: Any) -> float:
        mixer: Any = type(build("performer", dim=16, heads=1))(
            has_maps=False, dim=16, heads=1, causal=causal, **options
        )
        y = mixer.eval().mix_heads(q, k, v).y
        return float((y - exact).square().sum() / exact.square().sum())

    usual, small = (
        [error(features=count, **one) for count in (64, 1024)] for one in ({}, {"smallest_normaliser": 1e-6})
    )
    assert small[1] < small[0] / 2, (usual, small)
    assert usual[1] > usual[0], (usual, small)
    assert small[1] < usual[1] / 2, (usual, small)


@pytest.mark.parametrize("options", MAPS, ids=lambda options: options["feature_map"])
def test_each_causal_position_is_the_last_of_its_prefix(options: dict) -> None:
    """Its maxima too are those of the prefix."""
    both, causal = performer(**options), performer(causal=True, **options)
    causal.load_state_dict(both.state_dict())
    x = tokens(2, 150, 0)
    y = causal(x).y
    for length in (1, 2, 63, 64, 65, 130, 150):
        assert close(y[:, length - 1], both(x[:, :length]).y[:, -1]), length


def direct(mixer: Any, x: Tensor) -> Tensor:
    """Causal favorp and fourier from their definition: a (time, time, m) tensor of key features, one for each pair."""
    q, k, v = mixer.project(x)
    query, key = (mixer.feature_map(t, mixer.projection.matrix) for t in (q, k))
    seen = key.log_scale.cummax(-1).values
    keys = key.values[:, :, None] * (key.log_scale[:, :, None] - seen[..., None]).clamp(max=0).exp()[..., None]
    queries = query.values
    if mixer.config.feature_map == "fourier":
        queries = queries * (query.log_scale - query.log_scale.cummax(-1).values).exp()[..., None]
    eps = 1e-4 if mixer.config.feature_map == "favorp" else 0.0
    weights = torch.einsum("bhim,bhijm->bhij", queries + eps, keys + eps).tril()
    return mixer.merge_heads(weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-2))


@pytest.mark.parametrize("feature_map", ["favorp", "fourier"])
def test_growing_norms_stay_exact_and_finite(feature_map: str) -> None:
    """Log scales rise by hundreds, far beyond what exp can hold."""
    mixer = performer(torch.float64, causal=True, features=8, feature_map=feature_map)
    x = tokens(2, 200, 0).double() * torch.linspace(0.1, 60, 200)[:, None]
    log_scales = mixer.feature_map(mixer.project(x)[1], mixer.projection.matrix).log_scale
    assert log_scales.max() - log_scales.min() > 100
    expected = direct(mixer, x)
    assert close(mixer(x).y, expected, 1e-9)
    state, outputs = mixer.init_state(2), []
    for part in x.split([1, 70, 3, 126], 1):
        mixed = mixer(part, state=state)
        outputs.append(mixed.y)
        state = mixed.state
    assert close(torch.cat(outputs, 1), expected, 1e-9)

    single = performer(causal=True, features=8, feature_map=feature_map)
    x32 = x.float().requires_grad_()
    single(x32).y.sum().backward()
    assert x32.grad is not None
    assert torch.isfinite(x32.grad).all()


def test_sums_over_many_groups_of_blocks() -> None:
    """2500 positions: 40 blocks, three groups of them."""
    mixer = performer(torch.float64, dim=4, heads=1, causal=True, features=2)
    x = tokens(1, 2500, 0, dim=4).double() * torch.linspace(0.1, 20, 2500)[:, None]
    assert close(mixer(x).y, direct(mixer, x), 1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [*MAPS[:3], {"cosine": True, "max_length": 99}], ids=str)
def test_gradients_with_the_maxima_held_still(options: dict, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = performer(torch.float64, causal=causal, **options), tokens(1, 7, 1).double().requires_grad_()
    held: list[Tensor] = []

    def record(t: Tensor) -> Tensor:
        held.append(t.detach().clone())
        return held[-1]

    monkeypatch.setattr(noise, "constant", record)
    mixer(x)

    def run(x: Tensor) -> Tensor:
        replayed = iter(held)
        monkeypatch.setattr(noise, "constant", lambda t: next(replayed))
        return mixer(x).y

    assert torch.autograd.gradcheck(run, (x,))


def test_redrawn_matrices_change_in_training_only() -> None:
    mixer, x = performer(causal=True), tokens(2, 9, 0)
    assert torch.equal(mixer(x).y, mixer(x).y)
    mixer.train()
    assert not torch.equal(mixer(x).y, mixer(x).y)
    fixed = performer(causal=True, projection="fixed").train()
    assert torch.equal(fixed(x).y, fixed(x).y)


def test_a_stream_keeps_its_matrix_while_training() -> None:
    mixer, x = performer(causal=True), tokens(2, 9, 0)
    expected = mixer(x).y
    mixer.train()
    first = mixer(x[:, :4], state=mixer.init_state(2))
    second = mixer(x[:, 4:], state=first.state)
    assert close(torch.cat([first.y, second.y], 1), expected)


def test_cross_attention_reads_with_the_matrix_it_remembered_with() -> None:
    mixer, x, context = performer().train(), tokens(2, 5, 0), tokens(2, 9, 1)
    drawn: list[Tensor] = []

    def record(kind: noise.Kind, like: Tensor, shape) -> Tensor:
        drawn.append(noise.from_generator(kind, like, shape))
        return drawn[-1]

    with noise.drawing_from(record):
        first = mixer(x[:, :2], context=context, state=mixer.init_state(2))
        second = mixer(x[:, 2:], state=first.state)
    assert len(drawn) == 1
    mixer.eval().projection.matrix.copy_(drawn[0])
    assert close(torch.cat([first.y, second.y], 1), mixer(x, context=context).y)


def test_only_what_is_used_exists() -> None:
    assert dict(performer(projection="learnable").named_parameters())["projection.matrix"].shape == (4, 64, 4)
    assert "projection.matrix" in dict(performer(projection="fixed").named_buffers())
    for feature_map in ("dpfp", "relu-only", "sigmoid-only", "mlp-fourier"):
        names = performer(feature_map=feature_map, projection="learnable").state_dict()
        assert not any(name.startswith("projection") for name in names)


def test_cosine_weights_pairs_by_distance() -> None:
    mixer = performer(cosine=True, max_length=40, feature_map="sigmoid-only")
    plain = performer(feature_map="sigmoid-only")
    x = tokens(1, 12, 0)
    q, k, v = plain.project(x)
    theta = torch.arange(12) * (torch.pi / 2 / 40)
    weights = (q.sigmoid() + 0.1) @ (k.sigmoid() + 0.1).transpose(-1, -2) * (theta[:, None] - theta).cos()
    assert close(mixer(x).y, plain.merge_heads(weights @ v / weights.sum(-1, keepdim=True)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "dpfp", "features": 7}, "features >= 8"),
        ({"feature_map": "mlp-fourier", "features": 7}, "even"),
        ({"cosine": True, "causal": True}, "max_length"),
    ],
)
def test_refusals_at_build(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"performer: .*{message}"):
        performer(**options)


def test_cosine_refuses_lengths_above_its_maximum_and_contexts() -> None:
    causal = performer(cosine=True, max_length=8, causal=True)
    with pytest.raises(ValueError, match="performer: 9 tokens are more than max_length=8"):
        causal(tokens(2, 9, 0))
    state = causal(tokens(2, 6, 0), state=causal.init_state(2)).state
    with pytest.raises(ValueError, match="performer: 9 tokens"):
        causal(tokens(2, 3, 0), state=state)
    padding = torch.arange(9).expand(2, 9) >= 8
    assert torch.isfinite(causal(tokens(2, 9, 0), padding=padding).y).all()
    with pytest.raises(ValueError, match="performer with cosine=True cannot read a context"):
        performer(cosine=True)(tokens(2, 3, 0), context=tokens(2, 4, 1))
