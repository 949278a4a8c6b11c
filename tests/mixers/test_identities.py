"""Equalities that the mathematics implies, between mechanisms and within them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import Mixer, available, build, mixer_class
from subquad.testing import DIM, HEADS, Case, assert_close, close, enlarge, first_case, tokens


def twin(source: Mixer, name: str, **options: object) -> Any:
    """Another mechanism with the same projections as `source`."""
    torch.manual_seed(1)
    mixer = build(name, dim=DIM, heads=HEADS, **options)
    mixer.load_state_dict(
        {**mixer.state_dict(), **{k: v for k, v in source.state_dict().items() if k[:3] in ("qkv", "out")}}
    )
    return mixer.eval()


def softmax(causal: bool = False) -> Any:
    return first_case("softmax", causal).build()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_local_with_one_window_is_softmax(causal: bool, overlap: bool) -> None:
    full, x = softmax(causal), tokens(2, 13, 0)
    for window in (13, 20):
        local = twin(full, "local", causal=causal, window=window, overlap=overlap)
        assert close(local(x).y, full(x).y)


def test_local_with_one_window_on_a_grid_is_softmax() -> None:
    full, x = softmax(), tokens(2, 12, 0)
    for window, overlap in ((5, False), (64, False), (64, True)):
        assert close(twin(full, "local", window=window, overlap=overlap)(x, grid=(3, 4)).y, full(x).y)


@pytest.mark.parametrize("name", ["eva", "scatterbrain"])
def test_a_window_for_texts_is_refused_on_a_small_grid(name: str) -> None:
    with pytest.raises(ValueError, match=r"windows of 64 x 64 .* 3 x 4 .* window=4 or less"):
        build(name, dim=DIM, heads=HEADS)(tokens(2, 12, 0), grid=(3, 4))


def test_causal_local_is_causal_softmax_inside_the_first_window() -> None:
    full, x = softmax(causal=True), tokens(2, 20, 0)
    assert close(twin(full, "local", causal=True, window=8)(x).y[:, :8], full(x).y[:, :8])


def test_eva_that_summarises_single_tokens_is_softmax_over_doubled_keys() -> None:
    """One window, chunks of one token, k~ = k, beta = v: every key stands twice in the softmax: nothing changes."""
    full, x = softmax(), tokens(2, 12, 0)
    eva = twin(full, "eva", window=12, chunk_size=1, adaptive="linear")
    with torch.no_grad():
        eva.k_map.linear.weight.copy_(torch.eye(DIM // HEADS))
        eva.k_map.linear.bias.zero_()
    q, k, v = eva.project(x)
    doubled = torch.nn.functional.scaled_dot_product_attention(q, torch.cat([k, k], 2), torch.cat([v, v], 2))
    assert close(eva(x).y, eva.merge_heads(doubled))
    assert close(eva(x).y, full(x).y)


def test_causal_eva_is_causal_local_until_a_chunk_has_ended() -> None:
    eva: Any
    x = tokens(2, 20, 0)
    eva = Case.of("eva", {"window": 6, "chunk_size": 3, "relative": "table"}, causal=True).build()
    with torch.no_grad():
        eva.bias.table.zero_()
    local = twin(eva, "local", causal=True, window=6)
    assert close(eva(x).y[:, :3], local(x).y[:, :3])
    assert not close(eva(x).y[:, 3:6], local(x).y[:, 3:6])


def test_eva_with_a_chunk_size_equals_the_landmarks_that_make_it() -> None:
    counted, x = Case.of("eva", {"window": 4, "landmarks": 3}).build(), tokens(2, 24, 0)  # chunks of 8
    sized = build("eva", dim=DIM, heads=HEADS, window=4, chunk_size=8).eval()
    sized.load_state_dict(counted.state_dict())
    assert close(sized(x).y, counted(x).y)


def test_scatterbrain_approaches_softmax_with_more_features() -> None:
    full, x = softmax(), 0.5 * tokens(2, 32, 0)
    errors = []
    for features in (16, 4096):
        mixer = twin(full, "scatterbrain", window=4, features=features, projection="fixed")
        errors.append((mixer(x).y - full(x).y).norm().item())
    assert errors[1] < errors[0] / 4


def test_lara_with_equal_queries_and_keys_is_a_mean() -> None:
    """Without differences between tokens but in their values, every weight is equal."""
    lara: Any
    lara, x = first_case("lara").build(), tokens(2, 20, 0)
    width = DIM
    with torch.no_grad():
        lara.qkv.weight[: 2 * width] = 0
    value = lara.qkv(x)[..., 2 * width :].mean(1, keepdim=True).expand(-1, 20, -1)
    assert close(lara(x).y, lara.out(value))


OURS = [name for name in available() if mixer_class(name).__module__.startswith("subquad.")]
AVERAGING = [name for name in OURS if mixer_class(name).capabilities.averages]


@pytest.mark.parametrize("name", [*AVERAGING, "linformer"])
def test_equal_values_come_back_unchanged(name: str) -> None:
    """Attention is an average: when all values are equal, so are all outputs, whatever the weights."""
    mixer: Any = first_case(name).build()
    x = 0.3 * tokens(2, 24, 0)
    with torch.no_grad():
        mixer.qkv.weight[2 * DIM :] = 0
        if name == "linformer":  # values are compressed by F: let its rows be averages
            for compression in _compressions(mixer):
                compression.copy_(torch.full_like(compression, 1 / 24))
    expected = mixer.merge_heads(mixer.qkv.bias[2 * DIM :].view(1, HEADS, 1, -1).expand(2, -1, 24, -1))
    assert close(mixer(x).y, expected, 1e-4)


def _compressions(mixer: Mixer) -> list[Tensor]:
    return [p for name, p in mixer.named_parameters() if not name.startswith(("qkv", "out"))]


def test_weights_of_tests_are_far_from_uniform() -> None:
    mixer: Any = build("softmax", dim=DIM, heads=HEADS).eval()
    enlarge(mixer)
    q, k, _ = mixer.project(tokens(2, 24, 0))
    largest = (q @ k.transpose(-1, -2) * mixer.scale).softmax(-1).amax(-1)
    assert largest.mean() > 3 / 24


# ---------------------------------------------------------------------- defaults that follow the length


@pytest.mark.parametrize("time", [5, 16, 40, 128, 135, 256, 392, 450])
@pytest.mark.parametrize("name", ["lara", "eva"])
def test_defaults_follow_the_length(name: str, time: int) -> None:
    """They are those of an explicit number of landmarks, or of an explicit size of chunks."""
    count = min(49, max(16, time // 8))
    cells = -(-time // 16) * 16
    explicit = {"landmarks": count} if name == "lara" else {"window": 16, "chunk_size": max(8, cells // 49)}
    default, x = Case.of(name, {} if name == "lara" else {"window": 16}).build(), tokens(1, time, 0)
    assert_close(default(x).y, Case.of(name, explicit).build()(x).y, f"{time} tokens")


@pytest.mark.parametrize("options", [{"name": "lara"}, {"name": "eva"}, {"name": "eva", "overlap": True}], ids=str)
def test_defaults_of_a_row_follow_its_own_length(options: dict[str, Any]) -> None:
    lengths = (450, 20, 200, 130)
    name, more = options["name"], {key: value for key, value in options.items() if key != "name"}
    mixer, x = Case.of(name, more).build(), tokens(len(lengths), max(lengths), 0)
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    together = mixer(x, padding=padding).y
    for row, length in enumerate(lengths):
        assert_close(together[row, :length], mixer(x[row : row + 1, :length]).y[0], f"{length} tokens")


def test_eva_summarises_a_chunk_when_it_ends() -> None:
    """Not at every token of a stream; rows that are ahead end theirs earlier."""
    mixer, x = Case.of("eva", {"window": 4, "chunk_size": 4}, causal=True).build(), tokens(2, 12, 0)
    calls: list[int] = []
    mixer.get_submodule("k_map").register_forward_hook(lambda *_: calls.append(1))
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, :2] = True  # two tokens behind
    state = mixer.init_state(2)
    for place in range(12):
        state = mixer(x[:, place : place + 1], padding=padding[:, place : place + 1], state=state).state
    assert len(calls) == 3 + 2
