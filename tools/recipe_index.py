"""src/subquad/recipes/index.json: what `subquad recipes` shows of each recipe, from its comment and its model.

python -m tools.recipe_index
"""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import torch

from subquad.models import build_from_config
from subquad.nn.stack import mixer_names
from subquad.recipes import FOLDER, INDEX, Entry, short_names
from subquad.train.recipe import Recipe, read_recipe

ORIGINS = [
    re.compile(r"README of (?:\w+'s )?([\w/-]+)"),
    re.compile(r"([\w/-]+) README"),
    re.compile(r"Source: (?:the task of )?(.*?)(?:;|, smaller|\.$|\. (?=[A-Z]))"),
]
"""Where the comment of a recipe names the program or the paper that it follows."""
OURS = "subquad"


def recipe_index() -> str:
    """Every recipe in the order of their names."""
    return json.dumps([asdict(describe_recipe(name)) for name in short_names()], indent=1) + "\n"


def describe_recipe(name: str) -> Entry:
    path = FOLDER / f"{name}.yaml"
    comment, recipe = read_comment(path), read_recipe(path)
    title = re.split(r"(?<=\.) (?=[A-Z])|: ", comment)[0].removesuffix(".")
    with torch.device("meta"):
        model = build_from_config(recipe.model_data(recipe.task_class.expected_model_config(recipe.data)))
    mechanisms = sorted(mixer_names(recipe.model_data({})))
    return Entry(
        short_names()[name], title, recipe.task, mechanisms, _data(recipe), model.parameter_count(), _origin(comment)
    )


def read_comment(path: Path) -> str:
    """The comment that a recipe begins with, as one line."""
    lines = path.read_text().partition("task:")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


def _data(recipe: Recipe) -> str:
    embedded = getattr(recipe.data, "embedded", None)
    if embedded is not None:
        return f"embedded: {embedded}"
    files = recipe.data.input_files()
    return os.path.commonpath([file for name in files if name != "tokenizer" for file in files[name]])


def _origin(comment: str) -> str:
    return next((found[1] for pattern in ORIGINS if (found := pattern.search(comment))), OURS)


if __name__ == "__main__":
    INDEX.write_text(recipe_index())
    print(f"wrote {INDEX.name}")
