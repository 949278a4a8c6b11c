"""What a mechanism cannot do is refused aloud: a ValueError that names it, what is wrong and what to do."""

import pytest
import torch

from subquad.mixers import Mixer, available, build, mixer_class, register
from tests.mixer_cases import CROSS, DIM, EVERY, HEADS, STREAMING, Case, tokens

NAMES = available()
CAN = {name: mixer_class(name).capabilities for name in NAMES}


@pytest.mark.parametrize("name", [name for name in NAMES if not CAN[name].causal])
def test_causal_form(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} cannot be causal.*softmax.*lightconv"):
        build(name, dim=DIM, heads=HEADS, causal=True)


@pytest.mark.parametrize("name", [name for name in NAMES if not CAN[name].cross])
def test_cross_attention(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} cannot read a context.*softmax.*linformer"):
        Case(name, 0).build()(tokens(2, 5, 0), context=tokens(2, 7, 1))


@pytest.mark.parametrize("name", [name for name in NAMES if CAN[name].cross and CAN[name].causal])
def test_cross_attention_of_a_causal_mixer(name: str) -> None:
    with pytest.raises(ValueError, match="causal=False"):
        Case(name, 0, causal=True).build()(tokens(2, 5, 0), context=tokens(2, 7, 1))


@pytest.mark.parametrize("name", NAMES)
def test_streaming_without_a_causal_form(name: str) -> None:
    mixer = Case(name, 0).build()
    with pytest.raises(ValueError, match=rf"{name}.*(streaming|causal).*lightconv"):
        mixer(tokens(2, 5, 0), state=mixer.init_state(2))


def test_streaming_of_causal_eva_with_a_chunk_count() -> None:
    with pytest.raises(ValueError, match="give chunk_size"):
        build("eva", dim=DIM, heads=HEADS, causal=True, landmarks=4).init_state(1)


def test_unknown_names_and_options_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no mechanism is called 'lightcnv'; did you mean 'lightconv'\?"):
        build("lightcnv", dim=DIM)
    for name in NAMES:
        with pytest.raises(ValueError, match=rf"{name} has no option 'haeds'; did you mean 'heads'\?"):
            build(name, dim=DIM, haeds=2)
    with pytest.raises(ValueError, match=r"did you mean 'window'\?"):
        build("local", dim=DIM, windw=2)


@pytest.mark.parametrize("name", NAMES)
def test_heads_that_do_not_divide(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: 5 heads do not divide 16 channels; 4 heads would"):
        build(name, dim=16, heads=5)


SIZES = ("window", "landmarks", "chunk_size", "features", "slots", "max_length", "rank", "rank_multiple", "kernel_size")


@pytest.mark.parametrize("name", NAMES)
def test_sizes_below_one(name: str) -> None:
    for option in (*SIZES, "dim", "heads"):
        if option in mixer_class(name).Config.model_fields:
            with pytest.raises(ValueError, match=rf"{name}: {option}: .*greater than or equal to 1 \(got 0\)"):
                build(name, **{"dim": DIM, "heads": HEADS} | {option: 0})


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes(name: str) -> None:
    mixer, x = Case(name, 0).build(), tokens(2, 6, 0)
    for wrong in (x[0], x[..., :-1], x[None]):
        with pytest.raises(ValueError, match=rf"{name}: x must be \(batch, time, {DIM}\), got"):
            mixer(wrong)
    with pytest.raises(ValueError, match="empty sequence"):
        mixer(x[:, :0])
    with pytest.raises(ValueError, match=r"padding of x must be \(2, 6\)"):
        mixer(x, padding=torch.zeros(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="must be bool"):
        mixer(x, padding=torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"grid \(2, 2\) has 4 cells, x has 6 tokens"):
        mixer(x, grid=(2, 2))
    with pytest.raises(ValueError, match="without a context"):
        mixer(x, context_padding=torch.zeros(2, 6, dtype=torch.bool))


@pytest.mark.parametrize("name", [name for name in NAMES if CAN[name].causal])
def test_states_of_another_batch(name: str) -> None:
    mixer = Case(name, 0, causal=True).build()
    if mixer.why_no_streaming() is None:
        with pytest.raises(ValueError, match="the state holds 3 rows, x has 2"):
            mixer(tokens(2, 6, 0), state=mixer.init_state(3))
        with pytest.raises(ValueError, match="at least 1"):
            mixer.init_state(0)


@pytest.mark.parametrize("case", STREAMING, ids=str)
def test_states_of_another_mechanism(case: Case) -> None:
    mixer, x = case.build(), tokens(2, 6, 0)
    own = type(mixer.init_state(2))
    for other in {other.name: other for other in STREAMING}.values():
        state = other.build().init_state(2)
        if type(state) is not own:
            with pytest.raises(ValueError, match=f"{case.name}: the state is a {type(state).__name__}, which belongs"):
                mixer(x, state=state)


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_contexts_of_another_mechanism(case: Case) -> None:
    mixer, x = case.build(), tokens(2, 6, 0)
    own = type(mixer(x, context=x, state=mixer.init_state(2)).state)
    for other in {other.name: other for other in CROSS}.values():
        reader = other.build()
        state = reader(x, context=x, state=reader.init_state(2)).state
        if type(state) is not own:
            with pytest.raises(ValueError, match=f"{case.name}: the state is a {type(state).__name__}, which belongs"):
                mixer(x, state=state)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_inputs_of_another_precision(case: Case) -> None:
    mixer, x = case.build(), tokens(2, 6, 0)
    for wrong in (torch.float64, torch.bfloat16, torch.int64):
        with pytest.raises(ValueError, match=f"{case.name}: x is {wrong}, the parameters are torch.float32; convert"):
            mixer(x.to(wrong))
    with torch.autocast("cpu", torch.bfloat16):  # which converts them itself
        assert mixer(x.bfloat16()).y.isfinite().all()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_batch_of_nothing_gives_nothing(case: Case) -> None:
    mixer = case.build()
    for padding in (None, torch.zeros(0, 12, dtype=torch.bool)):
        x = torch.zeros(0, 12, DIM, requires_grad=True)
        y = mixer(x, padding=padding).y
        y.sum().backward()
        assert y.shape == x.shape
        assert x.grad is not None


def test_windows_and_grids_that_do_not_go_together() -> None:
    x = tokens(1, 6, 0)
    with pytest.raises(ValueError, match=r"dims=2.*grid=\(H, W\)"):
        build("local", dim=DIM, heads=HEADS, dims=2)(x)
    with pytest.raises(ValueError, match=r"relative bias.*dims=2"):
        build("local", dim=DIM, heads=HEADS, relative="table")(x, grid=(2, 3))
    with pytest.raises(ValueError, match="causal mixer reads sequences"):
        build("local", dim=DIM, heads=HEADS, causal=True)(x, grid=(2, 3))
    with pytest.raises(ValueError, match="causal mixer reads sequences"):
        build("eva", dim=DIM, heads=HEADS, causal=True, dims=2)


def test_options_that_do_not_go_together() -> None:
    for options, message in (
        ({"landmarks": 4, "chunk_size": 2}, "not both"),
        ({"causal": True, "form": "encoder"}, "looks both ways"),
        ({"causal": True, "window": 8, "chunk_size": 3}, "must divide the window"),
    ):
        with pytest.raises(ValueError, match=message):
            build("eva", dim=DIM, heads=HEADS, **options)
    with pytest.raises(ValueError, match="pool_map='dense' belongs to proposal='pool'"):
        build("lara", dim=DIM, heads=HEADS, pool_map="dense", proposal="adaptive")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="two mechanisms are called 'eva'"):
        register("eva")(type("Another", (Mixer,), {}))


def test_configs_are_frozen_and_rebuild_their_mixer() -> None:
    for name in NAMES:
        mixer = Case(name, 0).build()
        with pytest.raises(ValueError, match="frozen"):
            mixer.config.dim = 8
        stored = mixer.config.model_dump_json()
        again = mixer_class(name)(mixer_class(name).Config.model_validate_json(stored)).eval()
        again.load_state_dict(mixer.state_dict())
        assert again.config == mixer.config
        x = tokens(1, 5, 0)
        assert torch.equal(again(x).y, mixer(x).y)
