"""The first check of a recipe: it knows what the classes know, says what they say, and needs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from subquad.config import apply_change
from subquad.files import read_yaml
from subquad.packages import PLUGINS
from subquad.recipes import find_recipe, names
from subquad.recipes.schema import SCHEMA, check_content, check_recipe
from subquad.train.recipe import Recipe
from tools.recipe_schema import recipe_schema

PROGRAM = """
import sys
from subquad.cli.main import run
code = run(sys.argv[1:])
print("imported:", code, *sorted({".".join(name.split(".")[:2]) for name in sys.modules}), file=sys.stderr)
"""
REFUSED = [
    "lr=3",
    "task=xx",
    "task=[3]",
    "data=3",
    "data.images=3",
    "data.splits=3",
    "data.options=3",
    "data.tokenizer=bpe",
    "data.tokenizer.kind=wrds",
    "model=3",
    "model.heads=3",
    "model.preset=translation_smal",
    "model.encoder=3",
    "model.encoder.layrs=3",
    "model.encoder.layers=x",
    "model.encoder.mixer=evo",
    "model.encoder.mixer=softmax*1,evo",
    "model.encoder.mixer.windw=3",
    "model.encoder.mixer={name: eva, windw: 3}",
    "model.encoder.mixer={name: eva, window: a}",
    "model.encoder.mixer={name: lightconv, kernel_size: [3, a]}",
    "optim.betas=3",
    "optim.betas=[1, 2, 3]",
    "schedule.kind=cosin",
    "train=3",
    "train.updates=0",
    "train.updatess=5",
    "train.smoothing=2",
    "train.minutes=0",
    "train.precision=float",
    "train.budget=3",
    "train.budget.max_tokens=x",
    "decode.beem=3",
    "checkpoints.keep_last=x",
    "track.wandb=[1]",
]
LEFT = [
    "model.preset=pvt_medium2",
    "model.decoder.mixer=lara",
    "schedule.period=3",
    "data.folder=x",
    "train.updates=null",
    "optim.lr=3",
]
"""What only the classes know: what does not go together, and names that they explain."""


def phrases(*changes: str) -> dict[str, Any]:
    content: Any = read_yaml(find_recipe("phrases"), "recipe")
    for change in changes:
        content = apply_change(content, change)
    return content


def test_the_schema_is_current() -> None:
    assert SCHEMA.read_text() == recipe_schema(), "run `make docs`, or python -m tools.recipe_schema"


@pytest.mark.parametrize("name", names())
def test_the_recipes_of_the_package_pass(name: str) -> None:
    check_recipe(name)


@pytest.mark.parametrize("name", names())
def test_a_recipe_with_all_its_defaults_passes(name: str) -> None:
    """What a run stores of it: every option that there is."""
    check_content("stored", Recipe.parse(name, read_yaml(find_recipe(name), "recipe")).model_dump(mode="json"))


@pytest.mark.parametrize("change", REFUSED)
def test_it_says_what_the_classes_say(change: str) -> None:
    with pytest.raises(ValueError, match=r".") as first:
        check_content("recipe", phrases(change))
    with pytest.raises(ValueError, match=r".") as real:
        Recipe.parse("recipe", phrases(change))
    assert str(first.value) == str(real.value)


@pytest.mark.parametrize("change", LEFT)
def test_it_leaves_the_rest_to_them(change: str) -> None:
    check_content("recipe", phrases(change))
    with pytest.raises(ValueError, match=r"."):
        Recipe.parse("recipe", phrases(change))


def test_mechanisms_of_other_packages_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, "some_package")
    check_content("recipe", phrases("model.encoder.mixer={name: gla, gates: 3}"))
    check_content("recipe", phrases("task=summarise"))


def test_every_recipe_is_valid_for_an_editor() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for name in names():
        validator.validate(read_yaml(find_recipe(name), "recipe"))
    assert not validator.is_valid(phrases("train.updatess=5"))
    assert not validator.is_valid(phrases("data.images=3"))


# ---------------------------------------------------------------------- what commands import


def imported(folder: Path, *words: str) -> tuple[int, set[str]]:
    """The exit code of a command, and the packages and parts of subquad that it imported."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=True)
    _, code, *found = done.stderr.splitlines()[-1].split()
    return int(code), set(found)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["recipes", "dynamicconv"],
        ["train", "phrasess"],
        ["train", "phrases", "train.updatess=5"],
        ["compare", "phrases", "model.encoder.mixer=evo", "--mixers", "eva"],
    ],
    ids=" ".join,
)
def test_helps_and_refusals_need_no_torch(words: list[str], tmp_path: Path) -> None:
    code, found = imported(tmp_path, *words)
    assert code == (0 if words[0] in ("--help", "recipes") or "--help" in words else 1)
    assert not found & {"torch", "numpy", "numba", "sacrebleu", "tokenizers"}


def test_commands_import_only_what_they_use(tmp_path: Path) -> None:
    _, info = imported(tmp_path, "info", "eva")
    assert not info & {"subquad.data", "subquad.tasks", "subquad.train", "subquad.compare", "sacrebleu", "tokenizers"}
    _, dry = imported(tmp_path, "train", "digits", "--dry-run")
    assert not dry & {"subquad.compare", "subquad.interop", "jinja2", "sacrebleu", "wandb", "torchvision"}
