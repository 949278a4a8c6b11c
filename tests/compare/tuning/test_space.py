"""What tuning searches: for every mechanism by name, and in every kind of model."""

import pytest

from subquad.compare.tuning.space import LogRange, SearchSpace, Values
from subquad.mixers import available, mixer_class
from tests.compare.plans import PAIRS, PYRAMID, make_plan


def space(plan_recipe=PAIRS, mixer: str = "eva", **settings) -> SearchSpace:
    plan = make_plan(plan_recipe, [mixer], settings)
    return SearchSpace(plan, plan.variants[-1])


@pytest.mark.parametrize("name", available())
def test_everything_that_a_mechanism_names_can_be_tried(name: str) -> None:
    """Each value alone makes a model, and the mechanism's own value is among them."""
    found = space(mixer=name)
    assert set(found.dimensions) >= {"schedule.lr", "optim.weight_decay", "model.*.norm"}
    named = {option for option in mixer_class(name).tuned if "." not in option}
    assert named <= set(mixer_class(name).Config.model_fields), "an option of that name exists"
    for option, dimension in found.dimensions.items():
        if isinstance(dimension, Values):
            assert dimension.own in dimension.values
            for value in dimension.values:
                found.apply({option: value})
        else:
            assert dimension.low < dimension.own < dimension.high


def test_values_are_relative_to_what_the_mechanism_has() -> None:
    found = space(eva={"window": 12, "schedule": {"lr": 0.5}})
    assert found.dimensions["window"] == Values(12, (6, 12, 24))
    assert found.dimensions["schedule.lr"] == LogRange(0.5, 0.05, 5.0)
    assert "chunk_size" not in found.dimensions, "it is left out, so there is nothing to multiply"


def test_a_choice_changes_the_recipe_where_it_belongs() -> None:
    changed = space(mixer="lara").apply({"landmarks": 16, "model.*.norm": "pre", "schedule.lr": 0.25})
    assert changed.options == {"landmarks": 16}
    expected = {"model.encoder.norm": "pre", "model.decoder.norm": "pre", "schedule.lr": 0.25}
    assert changed.settings == expected
    assert changed.model["encoder"]["mixer"]["landmarks"] == 16
    assert "landmarks" not in str(changed.model["decoder"]), "lara cannot be causal: the decoder has another mechanism"
    assert changed.model["decoder"]["norm"] == "pre"


def test_what_has_no_options_of_its_own_is_tuned_by_the_recipe_alone() -> None:
    general = {"schedule.lr", "optim.weight_decay", "model.*.norm"}
    assert set(space(mixer="softmax").dimensions) == general
    assert set(space(mixer="hybrid=softmax*1,eva").dimensions) == general
    assert set(space(PYRAMID).dimensions) == {"schedule.lr", "optim.weight_decay"}, "stages are no settings"


def test_impossible_values_are_not_tried() -> None:
    """A convolution with a bidirectional kernel of even width is refused: its half and double are left out."""
    found = space(mixer="lightconv", lightconv={"kernel_size": 31})
    assert isinstance(found.dimensions["kernel_size"], Values)
    with pytest.raises(ValueError, match="kernel_size"):
        found.apply({"kernel_size": 0})
