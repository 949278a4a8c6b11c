"""Floors of a comparison: computed once, part of the result, and said to be missing when the data is gone."""

from pathlib import Path

import pytest

from subquad.compare.comparison import Comparison, Shard
from subquad.compare.floors import compute_floors, floors_are_open, stored_floors
from subquad.compare.plan import read_plan
from subquad.compare.report.result import read_result
from subquad.compare.variants import FLOOR_LABEL, add_floor, build_variants
from subquad.train.recipe import Recipe
from tests.compare.plans import PYRAMID, SCHEDULE, STACK

FIRST = Shard(1, 2)
"""The shard that computes floors, and nothing that needs trials."""


def recipe_on(folder: Path) -> Recipe:
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("a b c d\nb c a d\n" * 10)
    splits = {split: str(folder / f"{split}.txt") for split in ("train", "valid", "test")}
    data = {"splits": splits, "tokenizer": {"kind": "words"}, "blocks": {"tokens_per_sample": 8}}
    model = {"preset": "lm_small", "dim": 16, "decoder": STACK}
    given = {"task": "language-model", "data": data, "model": model, "schedule": SCHEDULE, "train": {"updates": 1}}
    return Recipe.parse("recipe", given)


def created(folder: Path, *, floors: bool = True, mixers: tuple[str, ...] = ("softmax",)) -> Comparison:
    return Comparison.create(recipe_on(folder), folder / "out", mixers, seeds=[], lengths=[], floors=floors)


def test_they_are_computed_once_and_part_of_the_result(tmp_path: Path) -> None:
    comparison, said = created(tmp_path), list[str]()
    comparison.run(lambda done, total, message: said.append(f"{done}/{total} {message}"), FIRST)
    floors, reason = stored_floors(comparison.out)
    assert ([floor.name for floor in floors], reason) == (["unigram", "bigram"], None)
    assert said == [f"1/1 floors: unigram {floors[0].value:.2f}, bigram {floors[1].value:.2f}"]
    assert not floors_are_open(comparison.out, comparison.plan)
    before = (comparison.out / "floors.json").stat().st_mtime_ns
    created(tmp_path).run(shard=FIRST)
    assert (comparison.out / "floors.json").stat().st_mtime_ns == before
    comparison.write_report("floors")
    assert read_result(comparison.out / "result.json").floors == floors


def test_a_model_without_mixing_is_trained_too_and_marked(tmp_path: Path) -> None:
    comparison = created(tmp_path)
    assert comparison.plan.labels == ["softmax", FLOOR_LABEL]
    model = comparison.plan.variant(FLOOR_LABEL).model
    assert model["decoder"]["mixer"]["name"] == "identity"
    assert (
        comparison.plan.variant_recipe(FLOOR_LABEL).model_data({"vocab": 8})["decoder"]["mixer"]["name"] == "identity"
    )
    result = comparison.write_report("floors")
    assert {mechanism.label: mechanism.floor for mechanism in result.mechanisms} == {
        "softmax": False,
        "no mixing": True,
    }


def test_a_mixer_that_was_named_is_not_added_again(tmp_path: Path) -> None:
    plan = created(tmp_path, mixers=("softmax", "mine=identity")).plan
    assert [(variant.label, variant.is_floor) for variant in plan.variants] == [("softmax", False), ("mine", True)]


def test_without_floors_there_are_none_and_a_later_call_adds_them(tmp_path: Path) -> None:
    comparison = created(tmp_path, floors=False)
    assert comparison.plan.labels == ["softmax"]
    assert not floors_are_open(comparison.out, comparison.plan)
    created(tmp_path)
    created(tmp_path, floors=False)
    plan = read_plan(comparison.out)
    assert plan.floors
    assert plan.labels == ["softmax", FLOOR_LABEL]


def test_data_that_is_gone_is_said_and_no_error(tmp_path: Path) -> None:
    comparison = created(tmp_path)
    recipe = comparison.plan.recipe
    gone = {**recipe, "data": {**recipe["data"], "splits": {"train": {"files": [str(tmp_path / "gone.txt")]}}}}
    compute_floors(comparison.out, comparison.plan.model_copy(update={"recipe": gone}))
    floors, reason = stored_floors(comparison.out)
    assert floors == []
    assert "gone.txt" in str(reason)
    (note,) = comparison.write_report("floors").notes
    assert note.startswith("Simple models of the data were not computed: ")
    assert floors_are_open(comparison.out, comparison.plan), "with the data as it is they can be computed"


@pytest.mark.parametrize("mixers", [["softmax"], ["eva", "lara"]])
def test_the_last_stage_of_a_pyramid_keeps_its_attention(mixers: list[str]) -> None:
    *_, floor = add_floor(PYRAMID, build_variants(PYRAMID, mixers, {}, mixers[0]))
    assert [stage["mixer"]["name"] for stage in floor.model["stages"][:-1]] == ["identity"]
    assert floor.remarks == ("no mixing: the last stage has softmax",)
