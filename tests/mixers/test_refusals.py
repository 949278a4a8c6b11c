"""Refusals of single mechanisms and options; what all refuse is in the contract."""

import pytest

from subquad.mixers import Mixer, available, build, mixer_class, register
from subquad.testing import DIM, HEADS, first_case, tokens

NAMES = available()
CAN = {name: mixer_class(name).capabilities for name in NAMES}


@pytest.mark.parametrize("name", [name for name in NAMES if not CAN[name].causal])
def test_causal_form(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} cannot be causal.*softmax.*lightconv"):
        build(name, dim=DIM, heads=HEADS, causal=True)


@pytest.mark.parametrize("name", [name for name in NAMES if CAN[name].cross and CAN[name].causal])
def test_cross_attention_of_a_causal_mixer(name: str) -> None:
    with pytest.raises(ValueError, match="causal=False"):
        first_case(name, causal=True).build()(tokens(2, 5, 0), context=tokens(2, 7, 1))


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


SIZES = (
    "window",
    "landmarks",
    "chunk_size",
    "features",
    "proj_k",
    "max_length",
    "rank",
    "rank_multiple",
    "kernel_size",
)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_below_one(name: str) -> None:
    for option in (*SIZES, "dim", "heads"):
        if option in mixer_class(name).Config.model_fields:
            with pytest.raises(ValueError, match=rf"{name}: {option}: .*greater than or equal to 1 \(got 0\)"):
                build(name, **{"dim": DIM, "heads": HEADS} | {option: 0})


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
        ({"causal": True, "variant": "encoder"}, "looks both ways"),
        ({"causal": True, "window": 8, "chunk_size": 3}, "must divide the window"),
    ):
        with pytest.raises(ValueError, match=message):
            build("eva", dim=DIM, heads=HEADS, **options)
    with pytest.raises(ValueError, match="pool_proj='dense' belongs to proposal='pool'"):
        build("lara", dim=DIM, heads=HEADS, pool_proj="dense", proposal="adaptive")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="two mechanisms are called 'eva'"):
        register("eva")(type("Another", (Mixer,), {}))
