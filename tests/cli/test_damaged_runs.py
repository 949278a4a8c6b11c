"""Commands that use a run whose checkpoints are damaged: none of them takes another checkpoint in silence."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from subquad.cli.main import run as command
from subquad.train.checkpoint import checkpoints, read_state

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")

RECIPE = {
    "task": "image-classification",
    "data": {"embedded": "digits"},
    "model": {"preset": "vision_small", "patch_size": 4, "dim": 8, "encoder": {"layers": 1, "heads": 2}},
    "schedule": {"kind": "constant", "lr": 1e-3},
    "train": {"epochs": 3, "budget": {"max_sentences": 50}},
    "checkpoints": {"keep_last": 3},
}
DAMAGES = {
    "state.json, changed": lambda path: change(path / "state.json"),
    "state.json, missing": lambda path: (path / "state.json").unlink(),
    "checksums.json, changed": lambda path: (path / "checksums.json").write_text("{"),
    "checksums.json, missing": lambda path: (path / "checksums.json").unlink(),
}
COMMANDS = {
    "evaluate": ["evaluate", "RUN"],
    "classify": ["classify", "RUN", "FOLDER/images.npy"],
    "export": ["export", "RUN", "--to", "torch", "--out", "FOLDER/exported"],
    "average": ["average", "RUN", "--epochs", "3"],
    "average of updates": ["average", "RUN", "--updates", "3"],
    "average of the best": ["average", "RUN", "best", "last"],
}


def change(path: Path) -> None:
    """A digit that is still JSON."""
    path.write_text(path.read_text().replace('"epoch": ', '"epoch": 1'))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    np.save(folder / "images.npy", np.zeros((1, 1, 8, 8), np.float32))
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder


def call(folder: Path, words: list[str]) -> int:
    return command([word.replace("RUN", str(folder / "run")).replace("FOLDER", str(folder)) for word in words])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(
    trained: Path, tmp_path: Path, capsys, name, damage
) -> None:
    folder = shutil.copytree(trained, tmp_path / "copy")
    damaged, *whole = checkpoints(folder / "run" / "checkpoints")
    DAMAGES[damage](damaged)
    before = sorted(folder.rglob("*"))
    assert call(folder, COMMANDS[name]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert damaged.name in said
    assert damage.partition(",")[0] in said
    assert name == "average of the best" or "--checkpoint" in said
    assert sorted(folder.rglob("*")) == before
    if name in ("evaluate", "classify", "export"):
        assert call(folder, [*COMMANDS[name], "--checkpoint", whole[0].name]) == 0


def test_only_training_goes_on_from_the_one_before(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "copy")
    damaged = checkpoints(folder / "run" / "checkpoints")[0]
    expected = read_state(damaged).update
    (damaged / "state.json").unlink()
    with pytest.warns(UserWarning, match=r"state\.json is missing; trying the one before it"):
        assert call(folder, ["train", "FOLDER/recipe.yaml", "--out", "RUN"]) == 0
    assert read_state(checkpoints(folder / "run" / "checkpoints")[0]).update == expected
