"""Descriptions of data and states of training by somebody who knows their checksums: used, or refused by one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.cli.main import run as command
from subquad.files import CHECKSUM, to_checksummed_json
from subquad.train.checkpoint import CHECKSUMS, STATE, checkpoints, checksum
from tests.fuzzing import called, edited, fuzzed
from tests.train.test_trainer import RECIPES, SCHEDULE


def forge(path: Path, data: st.DataObject) -> None:
    """Edits a description, and makes its checksum fit."""
    content = json.loads(path.read_text())
    content.pop(CHECKSUM, None)
    changed: Any = data.draw(edited(content))
    path.write_text(to_checksummed_json({str(key): value for key, value in changed.items()}))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the cat sat\na dog barks\n" * 20)
    words = ["--samples", "text", "--tokenizer", "words", "--workers", "1"]
    assert command(["data", "prepare", str(folder / "out"), "--train", str(folder / "text.txt"), *words]) == 0
    return folder / "out"


@fuzzed(30)
@given(data=st.data())
def test_edited_data(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    copied = tmp_path / "data"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(prepared, copied)
    forge(data.draw(st.sampled_from(sorted(copied.rglob("*.json")))), data)
    called(capsys, "data", "stats", copied)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe and its run of two updates."""
    folder = tmp_path_factory.mktemp("trained")
    task = "image-classification"
    train = {**RECIPES[task]["train"], "updates": 2, "validate_every": 1}
    recipe = {"task": task, **RECIPES[task], "schedule": SCHEDULE, "train": train}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder


@fuzzed(10)
@given(data=st.data())
def test_edited_states(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(trained / "run", run)
    for folder in checkpoints(run / "checkpoints"):
        content = json.loads((folder / STATE).read_text())
        changed = data.draw(edited({key: value for key, value in content.items() if key != "update"}))
        (folder / STATE).write_text(json.dumps({**changed, "update": content["update"]}))
        sums = json.loads((folder / CHECKSUMS).read_text())
        (folder / CHECKSUMS).write_text(json.dumps({**sums, STATE: checksum(folder / STATE)}))
    called(capsys, "train", trained / "recipe.yaml", "train.updates=3", "--out", run)
