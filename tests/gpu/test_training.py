"""Trainings on a GPU: the losses of the CPU, in half precision, and a resumed run that is the uninterrupted one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from subquad import api
from tests.gpu import recipes

TOLERANCE = 1e-3
"""Of validation losses after a few updates in float32, relative to those on the CPU."""
MIXERS = ["softmax", "lightconv", "dynamicconv", "performer", "local", "eva", "primal"]


def train(folder: Path, recipe: dict[str, Any], *changes: str) -> Path:
    folder.mkdir(exist_ok=True)
    api.train(recipes.write(folder, recipe), *changes, out=folder / "run")
    return folder / "run"


def losses(run: Path) -> list[float]:
    """The losses of all validations."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if entry["event"] == "valid"]


def train_on_both(
    folder: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[float]]:
    on_gpu = train(folder / "gpu", recipe)
    environment = json.loads((on_gpu / "environment.json").read_text())
    assert environment["device"] == torch.cuda.get_device_name()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        on_cpu = train(folder / "cpu", recipe)
    return losses(on_gpu), losses(on_cpu)


def assert_agree(found: list[float], expected: list[float], tolerance: float) -> None:
    assert len(found) == len(expected) > 1
    assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=pytest.mark.nightly if name != "eva" else ()) for name in MIXERS]
)
def test_losses_are_those_of_the_cpu(mixer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {"kernel_size": 3} if mixer.endswith("conv") else {}
    recipe = recipes.language_model(tmp_path, {"name": mixer, **kernel}, precision="float32")
    assert_agree(*train_on_both(tmp_path, recipe, monkeypatch), TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["translation", "text_classification", "image_classification"])
def test_losses_of_other_tasks(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = getattr(recipes, task)(tmp_path, precision="float32", updates=4, validate_every=2)
    assert_agree(*train_on_both(tmp_path, recipe, monkeypatch), TOLERANCE)


@pytest.mark.nightly
def test_masked_language_model(tmp_path: Path) -> None:
    recipe = recipes.language_model(tmp_path, {"name": "linformer", "max_length": 16}, "masked-language-model")
    assert losses(train(tmp_path / "masked", recipe))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses fall as in float32, within the rounding of half precision; dropout and clipping are on."""
    found = losses(train(tmp_path / "half", recipes.language_model(tmp_path, precision=precision)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        expected = losses(train(tmp_path / "float32", recipes.language_model(tmp_path, precision="float32")))
    assert_agree(found, expected, 3e-2)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """To the bit, with dropout: the generator of the GPU is saved and restored."""
    recipe = recipes.language_model(tmp_path)
    recipe["model"]["decoder"] |= {"dropout": 0.2}
    whole = train(tmp_path / "whole", recipe)
    train(tmp_path / "parts", recipe, "train.updates=2")
    parts = train(tmp_path / "parts", recipe)
    one, other = (load_file(run / "checkpoints" / "update-000000004" / "model.safetensors") for run in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
def test_peak_memory_is_that_of_the_device(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    train(tmp_path / "run", recipes.language_model(tmp_path))
    assert torch.cuda.max_memory_allocated() > 0
