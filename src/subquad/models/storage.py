"""Saves and loads a model as a folder of weights.safetensors and config.json, which has the checksum of the weights.

Files are written under temporary names, synced and renamed, the config last: a folder with a config has its weights.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from subquad.files import checksum, read_metadata, replace_synced, wrap_corrupt_data_errors, write_json
from subquad.mixers.registry import check_origins, origins
from subquad.models.base import Model, build_from_config
from subquad.nn.stack import mixer_names

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "weights.safetensors"


def save_model(model: Model, folder: str | Path) -> None:
    """Writes config and weights of the model. `load_model` restores them exactly."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    config = model.config.model_dump(mode="json")
    temporary = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(weights, temporary)
    description = {
        "format": FORMAT,
        "model": config,
        "mechanisms": origins(mixer_names(config)),
        "weights": {"file": WEIGHTS, "sha256": checksum(temporary)},
    }
    replace_synced(temporary, folder / WEIGHTS)
    write_json(folder / CONFIG, description)


def load_model(folder: str | Path) -> Model:
    """Loads the model of a folder, in eval mode."""
    folder = Path(folder)
    description = read_metadata(folder / CONFIG, FORMAT, "model")
    path = folder / WEIGHTS
    with wrap_corrupt_data_errors(f"the model in {folder}"):
        if checksum(path) != description["weights"]["sha256"]:
            raise ValueError(f"{path} is damaged or belongs to another {CONFIG}: its checksum differs")
        check_origins(f"the model in {folder}", description["mechanisms"])
        model = build_from_config(description["model"])
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    load_weights(model, weights)
    return model.eval()


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into the model. Raises ValueError with the names of unknown, missing and misshapen ones."""
    own = model.state_dict()
    problems = []
    if missing := sorted(own.keys() - weights.keys()):
        problems.append(f"missing: {_some(missing)}")
    if unknown := sorted(weights.keys() - own.keys()):
        problems.append(f"unknown: {_some(unknown)}")
    for name in sorted(own.keys() & weights.keys()):
        if own[name].shape != weights[name].shape:
            problems.append(f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}")
    if problems:
        raise ValueError(f"the weights do not fit the model; {'; '.join(problems)}")
    model.load_state_dict(dict(weights))


def _some(names: Iterable[str], most: int = 10) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
