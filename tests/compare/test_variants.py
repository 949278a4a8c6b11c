"""Mechanisms in models: where each can be used, and what is used elsewhere."""

from typing import Any

import pytest
import torch

from subquad.compare.variants import Variant, build_variant, build_variants, mixer_options
from subquad.models import build_from_config
from subquad.train.recipe import Recipe
from tests.compare.plans import PAIRS, PYRAMID, TEXT, recipe


def names(given: Recipe, variant: Variant) -> dict[str, Any]:
    with torch.device("meta"):
        model = build_from_config(given.model_copy(update={"model": variant.model}).model_data({}))
    return {place: options["name"] for place, options in mixer_options(model).items()}


def test_a_mechanism_stands_wherever_it_can() -> None:
    softmax, eva, lara = build_variants(PAIRS, ["eva", "lara"], {"eva": {"window": 4}}, "softmax")
    assert names(PAIRS, softmax) == {"encoder": "softmax", "decoder": "softmax", "decoder.cross": "softmax"}
    assert names(PAIRS, eva) == {"encoder": "eva", "decoder": "eva", "decoder.cross": "softmax"}
    assert names(PAIRS, lara) == {"encoder": "lara", "decoder": "softmax", "decoder.cross": "softmax"}
    assert lara.remarks == ("lara cannot be causal: the decoder has softmax",)
    assert eva.remarks == ()
    assert eva.model["encoder"]["mixer"] == {"name": "eva", "window": 4}


def test_the_last_stage_of_a_pyramid_and_the_recipes_own_options_stay() -> None:
    eva, lara, softmax = build_variants(PYRAMID, ["lara", "eva", "softmax"], {"eva": {"landmarks": 5}}, "eva")
    assert eva.model["stages"][0]["mixer"] == {"name": "eva", "window": 3, "landmarks": 5}
    assert names(PYRAMID, lara) == {"stages.0": "lara", "stages.1": "softmax"}
    assert (lara.remarks, softmax.remarks) == (("lara: the last stage has softmax",), ())


def test_the_recipes_own_model_is_a_mechanism_too() -> None:
    _, own = build_variants(PAIRS, ["mine=recipe"], {}, "softmax")
    assert names(PAIRS, own) == {"encoder": "softmax", "decoder": "lightconv", "decoder.cross": "softmax"}
    with pytest.raises(ValueError, match="takes no options here"):
        build_variants(PAIRS, ["mine=recipe"], {"mine": {"window": 3}}, "softmax")


def test_what_can_stand_nowhere_is_refused() -> None:
    text = recipe(TEXT, "language-model")
    with pytest.raises(ValueError, match="lara can be used nowhere in this model"):
        build_variants(text, ["lara"], {}, "softmax")
    with pytest.raises(ValueError, match=r"eva: .*has no option 'windw'; did you mean 'window'"):
        build_variant(text, "eva", "eva", {"windw": 3}, text.model)
