"""Mechanisms swapped into a trained baseline: what stays as it was, what the references are, and what is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.compare.measure.swap import (
    MEAN_OF_VALUES,
    Adaptation,
    SwapPoint,
    build_swapped,
    copy_weights,
    make_uniform,
    measure_swaps,
    with_mixers_of,
)
from subquad.compare.variants import FLOOR_LABEL, build_variants
from subquad.mixers import build
from subquad.mixers.softmax import Softmax
from subquad.models import build_from_config
from subquad.train.recipe import Recipe
from subquad.train.run import LoadedRun, build_task
from tests.compare.plans import SCHEDULE, STACK, make_plan

UPDATES = 2


def recipe_on(folder: Path, mixer: str = "softmax") -> Recipe:
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text("a b c d e\nb c a d\n" * 20)
    splits = {split: str(folder / f"{split}.txt") for split in ("train", "valid")}
    data = {"splits": splits, "tokenizer": {"kind": "words"}, "blocks": {"tokens_per_sample": 8}}
    model = {"preset": "lm_small", "dim": 16, "decoder": {**STACK, "dropout": 0.1, "mixer": mixer}}
    train = {"updates": 20, "budget": {"max_tokens": 64}}
    given = {"task": "language-model", "data": data, "model": model, "schedule": SCHEDULE, "train": train}
    return Recipe.parse("recipe", given)


@pytest.fixture
def adaptation_of(tmp_path: Path) -> Callable[[Recipe], Adaptation]:
    """A run whose weights are far from their first values, as if it had been trained for 20 updates."""

    def make(recipe: Recipe) -> Adaptation:
        task = build_task(recipe, tmp_path / "data")
        inputs = {"model": task.data_dependent_model_config()}
        torch.manual_seed(1)
        model = build_from_config(recipe.model_data(inputs["model"])).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        run = LoadedRun(tmp_path, recipe, model, tmp_path, 20, inputs)
        return Adaptation.of(run, task)

    return make


def measured(recipe: Recipe, mixers: list[str], adaptation: Adaptation) -> dict[str, SwapPoint]:
    config = adaptation.task.data_dependent_model_config()
    plan = make_plan(recipe, mixers, data_dependent_model_config=config)
    points = measure_swaps(plan, plan.labels, "softmax", adaptation, lambda _: None)
    return {point.mechanism: point for point in points}


def test_softmax_in_the_place_of_softmax_changes_nothing(tmp_path: Path, adaptation_of: Any) -> None:
    recipe = recipe_on(tmp_path)
    adaptation = adaptation_of(recipe)
    weights = copy.deepcopy(adaptation.run.model.state_dict())
    points = measured(recipe, ["local", "lightconv"], adaptation)
    softmax = points["softmax"]
    assert softmax.loss_before == softmax.baseline_loss, "to the last bit"
    assert (softmax.new_parameters, softmax.updates) == (0, UPDATES)
    assert softmax.loss_after is not None
    assert softmax.loss_after < softmax.loss_before  # type: ignore[operator]
    assert {label: point.status for label, point in points.items()} == dict.fromkeys(points, "done")
    assert points["lightconv"].new_parameters > points["local"].new_parameters  # type: ignore[operator]
    assert points["lightconv"].loss_before != softmax.loss_before
    for name, value in adaptation.run.model.state_dict().items():
        assert torch.equal(value, weights[name]), "the baseline itself is not trained on"
    perplexity = softmax.value_before
    assert perplexity == pytest.approx(torch.tensor(softmax.loss_before).double().exp().item())


def test_a_window_over_everything_is_exact_attention(tmp_path: Path, adaptation_of: Any) -> None:
    recipe = recipe_on(tmp_path)
    adaptation = adaptation_of(recipe)
    variants = build_variants(recipe, ["local"], {"local": {"window": 64}}, "softmax")
    config = adaptation.task.data_dependent_model_config()
    plan = make_plan(recipe, [], data_dependent_model_config=config).model_copy(update={"variants": tuple(variants)})
    (point,) = measure_swaps(plan, ["local"], "softmax", adaptation, lambda _: None)
    assert point.loss_before == pytest.approx(point.baseline_loss, rel=1e-5)


def test_references_are_no_mixing_and_the_mean_of_the_values(tmp_path: Path, adaptation_of: Any) -> None:
    recipe = recipe_on(tmp_path)
    adaptation = adaptation_of(recipe)
    references = {one.name: one for one in measured(recipe, [], adaptation)["softmax"].references}
    assert set(references) == {FLOOR_LABEL, MEAN_OF_VALUES}
    model = build_swapped(
        adaptation.run.model,
        with_mixers_of(recipe.model_data(adaptation.run.inputs["model"]), {"decoder": {"mixer": {"name": "identity"}}}),
    )
    copy_weights(adaptation.run.model, model)
    assert references[FLOOR_LABEL].loss_before == adaptation.validate(model)["loss"]
    for reference in references.values():
        assert reference.reason is None
        assert reference.loss_before is not None
        assert reference.loss_after is not None
        assert reference.loss_after < reference.loss_before


def test_another_baseline_has_no_mean_of_values(tmp_path: Path, adaptation_of: Any) -> None:
    recipe = recipe_on(tmp_path, "lightconv")
    references = measured(recipe, [], adaptation_of(recipe))["softmax"].references
    assert references[1].reason is not None
    assert references[1].reason.startswith("the baseline has lightconv")
    assert references[1].loss_before is None
    assert references[0].loss_after is not None


@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_zero_give_the_mean_of_the_values(causal: bool) -> None:
    torch.manual_seed(0)
    mixer = build("softmax", dim=8, heads=2, causal=causal).eval()
    assert isinstance(mixer, Softmax)
    torch.nn.init.normal_(mixer.qkv.weight)
    torch.nn.init.normal_(mixer.qkv.bias)
    make_uniform(mixer)
    x = torch.randn(1, 5, 8)
    values = mixer.qkv(x)[..., 16:]
    count = torch.arange(1, 6)[:, None]
    mean = values.cumsum(1) / count if causal else values.mean(1, keepdim=True).expand_as(values)
    y = mixer(x).y
    assert torch.allclose(y, mixer.out(mean), atol=1e-5)
    (gradient,) = torch.autograd.grad((y**3).sum(), [mixer.qkv.weight])
    assert not gradient[:8].any(), "they stay zero"
    assert gradient[16:].any()


def test_only_mixers_are_taken_from_the_other_config() -> None:
    config = {"kind": "x", "encoder": {"ffn_dim": 4, "mixer": "softmax"}, "stages": [{"dim": 1}, {"dim": 2}]}
    other = {"kind": "x", "encoder": {"ffn_dim": 9, "mixer": "eva"}, "stages": [{"mixer": "lara"}, {"dim": 3}]}
    assert with_mixers_of(config, other) == {
        "kind": "x",
        "encoder": {"ffn_dim": 4, "mixer": "eva"},
        "stages": [{"dim": 1, "mixer": "lara"}, {"dim": 2}],
    }
