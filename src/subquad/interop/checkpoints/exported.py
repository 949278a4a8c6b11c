"""Folders that `subquad export --to huggingface` wrote become runs again.

Of the folder these files are read, all of them as data: config.json and model.safetensors, the recipe, and what turns
text or images into the model's inputs. transformers is not needed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from subquad.data.tokenizers import load_tokenizer
from subquad.files import CHECKSUM, read_metadata, read_yaml
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles
from subquad.models import build_from_config
from subquad.models.storage import load_weights
from subquad.tasks.base import INPUTS, INPUTS_FORMAT, TOKENIZERS
from subquad.train.run_folder import RECIPE

SUPPORTED = "folders that `subquad export --to huggingface` wrote"
CONFIG, WEIGHTS, PREFIX = "config.json", "model.safetensors", "model."
NOT_TAKEN = ("task", "data", "model", "track")
"""Sections of the recipe that are given apart, or that belong to whoever trained the model."""


@dataclass(frozen=True)
class ExportedFolder:
    """A folder of an export. config: the content of its config.json."""

    path: Path
    config: Mapping[str, Any]


def open_exported(path: Path) -> ExportedFolder:
    """Opens a folder. One that `subquad export --to huggingface` did not write is a ValueError."""
    needed = (CONFIG, WEIGHTS, RECIPE, INPUTS)
    if missing := [name for name in needed if not (path / name).is_file()]:
        raise ValueError(f"{path} is none of the {SUPPORTED}: it holds no {missing[0]}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} is damaged: {error}") from None
    if not isinstance(config, Mapping) or not isinstance(config.get("subquad"), Mapping):
        raise ValueError(f"{path} is none of the {SUPPORTED}: its {CONFIG} is of another kind of model")
    return ExportedFolder(path, config)


def recognises(contents: Any) -> bool:
    return isinstance(contents, ExportedFolder)


def convert(contents: ExportedFolder, folder: Path, texts: TextFiles) -> ConvertedRun:  # noqa: ARG001
    """Returns the exported model with its recipe, whose files may have to be named anew."""
    path = contents.path
    model = build_from_config(contents.config["subquad"])
    try:
        weights = load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS} is damaged: {error}") from None
    load_weights(model, {name.removeprefix(PREFIX): value for name, value in weights.items()})
    inputs = read_metadata(path / INPUTS, INPUTS_FORMAT, "inputs of a model", ["task", "model", CHECKSUM])
    task = inputs["task"]
    sides = sorted(side.name for side in (path / TOKENIZERS).iterdir()) if (path / TOKENIZERS).is_dir() else []
    recipe = read_yaml(path / RECIPE, "recipe")
    return ConvertedRun(
        origin="an export of subquad",
        task=task,
        model=model.eval(),
        tokenizers={side: load_tokenizer(path / TOKENIZERS / side) for side in sides},
        inputs={name: value for name, value in inputs.items() if name not in ("format", "task", "model", CHECKSUM)},
        recipe={name: section for name, section in recipe.items() if name not in NOT_TAKEN},
        data=recipe["data"],
        notes=("an export has no state of the optimiser: further training begins with the weights alone",),
    )
