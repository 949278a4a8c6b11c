"""A trained run, ready for use: its model in eval mode with the weights of a checkpoint, and what inputs need.

A run folder is enough by itself: recipe.yaml, inputs.json, tokenizers/ and checkpoints/. Neither the training data nor
its tokens are opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subquad.data.tokenizers import Tokenizer, load_tokenizer
from subquad.files import CHECKSUM, read_metadata, wrap_corrupt_data_errors
from subquad.models import Model, model_from
from subquad.models.storage import load_weights
from subquad.tasks.base import INPUTS, INPUTS_FORMAT, TOKENIZERS, Task
from subquad.tasks.classification import ClassificationTask
from subquad.tasks.language import LanguageTask
from subquad.tasks.masked import MaskedTask
from subquad.tasks.translation import TranslationTask
from subquad.train.checkpoint import Ranking, best, checkpoints, load_weights_of, read_state
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import RECIPE

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (TranslationTask, LanguageTask, MaskedTask, ClassificationTask)
}
FREE = ("decode", "data")
"""Sections of a recipe that may be changed for a model that is trained already."""


@dataclass(frozen=True)
class Loaded:
    """A run with the weights of one checkpoint. inputs: what inputs.json says."""

    folder: Path
    recipe: Recipe
    model: Model
    checkpoint: Path
    update: int
    inputs: dict[str, Any]

    def tokenizer(self, side: str) -> Tokenizer:
        """The tokenizer of `source`, `target` or `text`."""
        return load_tokenizer(self.folder / TOKENIZERS / side)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_run(folder: str | Path, checkpoint: str = "best", changes: Sequence[str] = ()) -> Loaded:
    """The model of a run, on the GPU if there is one.

    checkpoint: `best` by the validation metric, `last`, the name of one (such as update-000001000 or average), or the
    path of one. Where the run keeps a moving average of the weights, that is used, as in validation. changes: to the
    recipe, for sections that a trained model leaves open, such as decode.beam=4.
    """
    folder = Path(folder)
    check_run(folder)
    for change in changes:
        if change.partition("=")[0].partition(".")[0] not in FREE:
            raise ValueError(f"{change}: the model is trained; only options of {' and '.join(FREE)} can change")
    recipe = read_recipe(folder / RECIPE, changes)
    if not (folder / INPUTS).is_file():
        raise ValueError(
            f"{folder} holds no {INPUTS}; `subquad train RECIPE --out {folder}` writes it without training"
        )
    inputs = read_metadata(folder / INPUTS, INPUTS_FORMAT, "inputs of a model", ["model", CHECKSUM])
    with wrap_corrupt_data_errors(f"the run {folder}"):
        path = find_checkpoint(folder, recipe, checkpoint)
        weights, state = load_weights_of(path), read_state(path)
        model = model_from(recipe.model_data(inputs["model"]))
        load_weights(model, weights)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Loaded(folder, recipe, model.to(device).eval(), path, state.update, inputs)


def check_run(folder: Path) -> None:
    """Refuses what is no run directory, and says what it is instead."""
    if not (folder / RECIPE).is_file():
        why = f"it holds no {RECIPE}" if folder.is_dir() else "it is a file" if folder.exists() else "there is none"
        raise ValueError(f"{folder} is no run: {why}; `subquad train RECIPE --out FOLDER` makes one")


def find_checkpoint(folder: Path, recipe: Recipe, name: str) -> Path:
    """The folder of a checkpoint: `best`, `last`, a name among the run's, or a path."""
    within = folder / "checkpoints"
    every = checkpoints(within)
    if not every and name in ("best", "last"):
        raise ValueError(f"{folder} has no checkpoint yet; `subquad train {folder / RECIPE} --out {folder}` goes on")
    if name == "last":
        return every[0]
    if name == "best":
        task = TASKS[recipe.task]
        if found := best(within, Ranking(task.metric, task.better)):
            return found[0]
        if len(every) == 1:  # an imported one: it was validated elsewhere
            return every[0]
        raise ValueError(f"no checkpoint of {folder} has been validated; take --checkpoint last")
    for path in (within / name, Path(name)):
        if path.is_dir():
            return path
    known = sorted(path.name for path in within.iterdir() if not path.name.startswith(".")) if within.is_dir() else []
    raise ValueError(f"{folder} has no checkpoint {name!r}; it has best, last, {', '.join(known) or 'nothing'}")
