"""Numbers of parameters: as many as the baseline's, by the width of the feed-forward networks."""

from typing import Any

import pytest

from subquad.compare.dry_run import plan_mechanisms
from subquad.compare.matching import TOLERANCE, count_parameters, match_parameters
from subquad.compare.variants import Variant, build_variants
from subquad.train.recipe import Recipe
from tests.compare.plans import PAIRS, PYRAMID, recipe

STACK = {"layers": 2, "heads": 4, "ffn_dim": 128}
IMAGES = recipe({"preset": "vision_small", "dim": 32, "encoder": STACK}, "image-classification")
DATA = {"num_classes": 10, "channels": 1, "image_size": 8}
WIDTH = "model.encoder.ffn_dim"
Settings = dict[str, dict[str, Any]]


def matched(given: Recipe, mixers: list[str], settings: Settings | None = None) -> tuple[list[Variant], list[float]]:
    """The variants, and how many parameters each has for one of the baseline's."""
    data = DATA if given is IMAGES else {}
    variants = match_parameters(given, build_variants(given, mixers, settings or {}, "softmax"), data)
    counts = [count_parameters(given, variant, data) for variant in variants]
    return variants, [count / counts[0] for count in counts]


def test_widths_make_up_for_what_a_mechanism_has_more_or_less() -> None:
    mixers = ["dynamicconv", "lightconv", "local", "linformer", "short=linformer"]
    variants, shares = matched(IMAGES, mixers, {"short": {"max_length": 16, "proj_k": 4}})
    softmax, dynamicconv, lightconv, local, linformer, short = variants
    assert shares[:4] + shares[5:] == pytest.approx([1] * 5, abs=TOLERANCE)
    assert dynamicconv.widths == {WIDTH: 80}, "a multiple of 8"
    assert dynamicconv.model["encoder"]["ffn_dim"] == 80
    assert lightconv.widths == {WIDTH: 144}
    assert softmax.widths == local.widths == short.widths == {}, "what is equal enough stays"
    assert (linformer.widths, shares[4] > 5) == ({}, True), "no width makes up for its tables"


def test_a_width_that_multiples_of_8_miss_is_matched_exactly() -> None:
    stack = {"layers": 2, "heads": 2, "ffn_dim": 16}
    narrow = recipe({"preset": "vision_small", "dim": 8, "positions": False, "encoder": stack}, "image-classification")
    (_, variant), shares = matched(narrow, ["dynamicconv"], {"dynamicconv": {"kernel_size": 15}})
    assert variant.widths[WIDTH] % 8
    assert shares[1] == pytest.approx(1, abs=TOLERANCE)


def test_only_stacks_with_another_mechanism_change() -> None:
    given = recipe({"preset": "translation_small", "dim": 32, "source_vocab": 50, "target_vocab": 50, "encoder": STACK})
    (_, lara), shares = matched(given, ["lara"], {"lara": {"model.encoder.layers": 3}})
    assert set(lara.changes) == {"model.encoder.layers", WIDTH}, "the decoder has the baseline's"
    assert shares[1] == pytest.approx(1, abs=TOLERANCE)


def test_what_was_set_and_the_recipes_own_model_stay() -> None:
    (_, own, conv), _ = matched(IMAGES, ["own=recipe", "dynamicconv"], {"dynamicconv": {WIDTH: 100}})
    assert own.changes == {}
    assert conv.changes == {WIDTH: 100}
    (_, eva), _ = matched(PYRAMID, ["lightconv"])
    assert eva.changes == {}, "stages of a pyramid"


def test_a_dry_run_counts_parameters_and_trials() -> None:
    planned = plan_mechanisms(PAIRS, ["lara", "hybrid=eva,softmax"], options={"lara": {"schedule.lr": 1e-4}}, seeds=2)
    assert [one.variant.label for one in planned] == ["softmax", "lara", "hybrid", "no mixing"]
    assert all(one.seeds == (1, 2) and not one.runs for one in planned)
    assert planned[1].variant.settings == {"schedule.lr": 1e-4}
    assert planned[0].parameters == count_parameters(PAIRS, planned[0].variant, {})
