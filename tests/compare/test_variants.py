"""Mechanisms in models: where each can be used, and what is used elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.compare.plan import Plan, TrialName
from subquad.compare.settings import read_settings, split_settings
from subquad.compare.variants import Variant, build_variant, build_variants, mixer_options
from subquad.mixers import available, mixer_class
from subquad.models import build_from_config
from subquad.train.recipe import Recipe, read_recipe
from tests.compare.plans import PAIRS, PYRAMID, TEXT, make_plan, recipe

ROOT = Path(__file__).parents[2]


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


# ---------------------------------------------------------------------- settings of one mechanism


def test_a_mechanism_may_have_a_recipe_of_its_own() -> None:
    """Options of the mechanism and changes to sections of the recipe are told apart by name."""
    given: dict[str, dict[str, Any]] = {
        "eva": {"window": 4, "schedule": {"lr": "1e-2"}, "optim": {"betas": [0.9, 0.98]}, "train.aux_weight": 0.1},
        "softmax": {"model": {"encoder": {"dropout": 0.1}}},
    }
    plan = make_plan(PAIRS, ["eva"], given)
    eva, softmax = plan.variant("eva"), plan.variant("softmax")
    assert eva.options == {"window": 4}
    assert eva.settings == {"schedule.lr": 1e-2, "optim.betas": [0.9, 0.98], "train.aux_weight": 0.1}
    ours, base = plan.trial_recipe(TrialName("eva", 2)), plan.trial_recipe(TrialName("softmax", 2))
    assert (ours["schedule"]["lr"], base["schedule"]["lr"]) == (1e-2, 1e-3)
    assert (ours["optim"]["betas"], ours["train"]["aux_weight"], ours["train"]["seed"]) == ([0.9, 0.98], 0.1, 2)
    assert (base["model"]["encoder"]["dropout"], "dropout" in ours["model"]["encoder"]) == (0.1, False)
    assert softmax.settings == {"model.encoder.dropout": 0.1}
    assert plan.variant_recipe("eva").train.aux_weight == 0.1
    plain = make_plan(PAIRS, ["eva"], {"eva": {"window": 4}})
    trials = plan.trials()
    assert all(plan.trial_key(trial) != plain.trial_key(trial) for trial in trials)
    assert Plan.model_validate(json.loads(plan.model_dump_json())) == plan


def test_options_of_one_stack_can_be_set() -> None:
    _, conv = build_variants(
        PAIRS, ["lightconv"], {"lightconv": {"model.encoder.mixer.kernel_size": [3, 5]}}, "softmax"
    )
    assert conv.model["encoder"]["mixer"] == {"name": "lightconv", "kernel_size": [3, 5]}
    assert conv.model["decoder"]["mixer"] == {"name": "lightconv"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("schedule.lrr", r"eva: schedule has no option 'lrr'; did you mean 'lr'"),
        ("shedule.lr", r"eva.shedule.lr: 'shedule' is none of the sections .*; did you mean 'schedule'"),
        ("model.encoder.droput", r"encoder has no option 'droput'; did you mean 'dropout'"),
        ("train", r"eva.train: name an option of the section train"),
        ("train.seed", r"eva.train.seed cannot be set: every mechanism is trained with the same seeds"),
        ("data.embedded", r"eva.data.embedded: all mechanisms have the same data"),
        ("task", r"eva.task: all mechanisms have the same task"),
        ("model.preset", r"eva.model.preset cannot be set"),
        ("model.encoder.mixer.name", r"eva.model.encoder.mixer.name cannot be set: it would replace eva"),
        ("name", r"eva.name cannot be set: it would replace eva"),
        ("windw", r"has no option 'windw'; did you mean 'window'"),
    ],
)
def test_wrong_settings_are_refused_by_name(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_variants(PAIRS, ["eva"], {"eva": {setting: 1}}, "softmax")


def test_a_setting_within_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim.betas.first cannot be set: betas was given a value of its own"):
        build_variants(PAIRS, ["eva"], {"eva": {"optim.betas": [0, 0], "optim.betas.first": 1}}, "softmax")


# ---------------------------------------------------------------------- patterns


def test_a_pattern_of_mechanisms_is_one_of_them() -> None:
    given = {"hybrid": {"rank": 4, "attention_dropout": 0.1}}
    _, hybrid = build_variants(PAIRS, ["hybrid=softmax*1,primal"], given, "softmax")
    assert hybrid.mixer == "softmax*1,primal"
    assert names(PAIRS, hybrid)["encoder"] == names(PAIRS, hybrid)["decoder"] == ["softmax", "primal"]
    _, local, lara = build_variants(PAIRS, ["a=local,softmax", "b=softmax,lara"], {}, "softmax")
    assert names(PAIRS, local)["decoder"] == ["local", "softmax"]
    assert names(PAIRS, lara)["decoder"] == "softmax", "one of its mechanisms cannot be causal"
    assert lara.remarks == ("b cannot be causal: the decoder has softmax",)


def test_patterns_that_do_not_fit_are_refused() -> None:
    for pattern, message in (
        ("hybrid=softmax*5,primal", r"hybrid: .*has 6 layers; the stack has 2"),
        ("hybrid=softmax,primall", r"no mechanism is called 'primall'; did you mean 'primal'"),
        ("softmax,primal", r"'softmax,primal' is a pattern of mechanisms; give it a label"),
        ("eva,hybrid=softmax,primal", r"is a pattern of mechanisms; give it a label and a --mixers of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            build_variants(PAIRS, [pattern], {}, "softmax")


# ---------------------------------------------------------------------- published options

RECIPES = {
    ("eva", "imagenet"): ("imagenet_evit_tiny_p16_eva", "encoder"),
    ("eva", "wmt14"): ("wmt14_en_de_eva_16", "encoder"),
    ("eva", "wikitext103"): ("wikitext103_causal_eva_16", "decoder"),
    ("lara", "imagenet"): ("imagenet_evit_tiny_p16_lara", "encoder"),
    ("lara", "wmt14"): ("wmt14_en_de_lara_16", "encoder"),
    ("local", "imagenet"): ("imagenet_evit_tiny_p16_local", "encoder"),
    ("performer", "imagenet"): ("imagenet_evit_tiny_p16_performer", "encoder"),
    ("primal", "wikitext103"): ("wikitext103_primal", "decoder"),
}


@pytest.mark.parametrize("mechanism", [name for name in available() if mixer_class(name).published])
def test_published_options_are_those_of_the_recipes(mechanism: str) -> None:
    for name, published in mixer_class(mechanism).published.items():
        file, stack = RECIPES[mechanism, name]
        theirs = read_recipe(file)
        options, settings = split_settings(mechanism, published)
        assert {"name": theirs.model[stack]["mixer"]["name"], **options} == theirs.model[stack]["mixer"]
        assert settings == read_settings(theirs.model_dump(), settings)


def test_published_options_are_defaults() -> None:
    given = {"primal:wikitext103": {"rank": 5}}
    _, primal, eva = build_variants(PAIRS, ["primal:wikitext103", "e=eva:wmt14"], given, "softmax")
    assert (primal.mixer, primal.options) == ("primal", {"rank": 5})
    assert primal.settings == {"train.aux_weight": 0.1 / 2048}
    assert eva.options == mixer_class("eva").published["wmt14"]
    (kept,) = build_variants(PYRAMID, ["eva"], {}, "eva")
    (published,) = build_variants(PYRAMID, ["eva=eva:wikitext103"], {}, "eva")
    assert kept.model["stages"][0]["mixer"] == {"name": "eva", "window": 3}
    assert published.model["stages"][0]["mixer"] == {"name": "eva", **published.options}, "and not the recipe's"
    with pytest.raises(ValueError, match=r"eva:imagnet: eva:imagenet, .* published options of eva; did you mean 'imag"):
        build_variants(PAIRS, ["eva:imagnet"], {}, "softmax")
    with pytest.raises(ValueError, match="none is known as published options of softmax"):
        build_variants(PAIRS, ["s=softmax:wmt14"], {}, "softmax")
