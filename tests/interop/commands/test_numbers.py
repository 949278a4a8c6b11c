"""Parameters and first learning rates are the originals', since recipes and conversion may share a mistake."""

import json
import math

import pytest

from subquad.interop.commands import convert_commands
from subquad.train.schedules import Schedule
from tests.interop.commands import seeds
from tests.interop.commands.converted import GOLDEN, meta_model, recipe_of

COUNTED_ELSEWHERE = {
    "wmt14_en_de_eva_32": 60_966_784,
    "wikitext103_causal_eva_16": 247_471_104,
    "wikitext103_causal_eva_32": 449_548_288,
}
"""Parameters of the original programs' models, counted there."""


@pytest.mark.parametrize("name", COUNTED_ELSEWHERE)
def test_a_model_has_the_parameters_of_the_original(name: str) -> None:
    assert meta_model(recipe_of(convert_commands(seeds.TRAININGS[name]))).parameter_count() == COUNTED_ELSEWHERE[name]


@pytest.mark.parametrize("name", seeds.IMAGE_COMMANDS)
def test_an_image_model_has_the_parameters_of_the_original(name: str) -> None:
    counts = json.loads((GOLDEN / "efficient-attention/param_counts.json").read_text())
    size, _, mechanism = name.removeprefix("imagenet_").rpartition("_")
    found = meta_model(recipe_of(convert_commands(seeds.IMAGE_COMMANDS[name]))).parameter_count()
    assert found == counts[f"{size.replace('pvt_v2_b3', 'pvt_medium2')}/{mechanism}"]


FAMILIES = {
    "iwslt14": (5e-4, 4000),
    "wmt16": (1e-3, 10000),
    "wmt14_en_fr": (1e-3, 10000),
    "wikitext103_p": (1e-3, 6000),
    "wmt14_en_de": (7e-4, 6000),
    "wikitext103_causal": (1.0, 16000),
}
"""The rate and the updates of warm-up that fairseq's commands and main.sh of efficient-attention name."""


@pytest.mark.parametrize("name", [name for name in seeds.TRAININGS if name not in seeds.IMAGE_COMMANDS])
def test_the_first_learning_rates_of_a_command(name: str) -> None:
    """A line from 1e-7 on; fairseq's own numbers of the same line are met where they are at hand."""
    recipe = recipe_of(convert_commands(seeds.TRAININGS[name]))
    schedule = Schedule(recipe.schedule, recipe.train.updates, recipe.train.epochs)
    ((rate, warmup),) = (line for begin, line in FAMILIES.items() if name.startswith(begin))
    line = [1e-7 + update * (rate - 1e-7) / warmup for update in range(20)]
    assert [schedule.learning_rate(update) for update in range(20)] == pytest.approx(line, rel=1e-12)
    curves = json.loads((GOLDEN / "fairseq/lr_schedules.json").read_text())
    assert recipe.train.updates is not None
    whole = {"lr": [rate], "warmup_updates": warmup, "warmup_init_lr": 1e-7}
    for curve in (*curves["inverse_sqrt"], *curves["cosine"]):
        own = {"lr_period_updates": recipe.schedule.period} if "lr_period_updates" in curve["config"] else {}
        if curve["config"].items() >= (whole | own).items():
            values = {update: value for update, value in curve["values"][1:] if update < recipe.train.updates}
            assert {update: schedule.learning_rate(update) for update in values} == pytest.approx(values, rel=1e-9)


@pytest.mark.parametrize("name", seeds.IMAGE_COMMANDS)
def test_the_first_learning_rates_of_images(name: str) -> None:
    """Those of timm: a value an epoch, with ten epochs of warm-up; 128 images on each of 8 GPUs are twice 512."""
    recipe = recipe_of(convert_commands(seeds.IMAGE_COMMANDS[name]))
    schedule = Schedule(recipe.schedule, recipe.train.updates, recipe.train.epochs)
    expected = [1e-6 + epoch * (1e-3 - 1e-6) / 10 for epoch in range(10)]
    expected += [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * epoch / 300)) / 2 for epoch in range(10, 20)]
    assert [schedule.learning_rate(0, epoch) for epoch in range(20)] == pytest.approx(expected, rel=1e-9)
