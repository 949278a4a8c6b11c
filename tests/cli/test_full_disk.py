"""Commands that write to a disk without room: one line names the file, nothing is left, and the same command works."""

import os
from pathlib import Path

import pytest
import yaml

from subquad.cli.main import run as command
from subquad.files import is_alive, new_folder
from tests.cli.test_damaged_runs import RECIPE
from tests.train.test_checkpoint import files_up_to

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")

COMMANDS = {
    "evaluate": (["evaluate", "RUN", "--out", "NEW/result.json"], "result.samples.safetensors"),
    "torch": (["export", "RUN", "--to", "torch", "--out", "NEW/exported"], "exported"),
    "onnx": (["export", "RUN", "--to", "onnx", "--out", "NEW/exported"], "exported"),
    "huggingface": (["export", "RUN", "--to", "huggingface", "--out", "NEW/exported"], "exported"),
    "prepare": (
        ["data", "prepare", "NEW/data", "--samples", "text", "--train", "TEXT", "--tokenizer", "bytes"],
        "train.text.tokens",
    ),
}
NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "huggingface": ("transformers",)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "train": {"updates": 1}}))
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 1000)
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "onnx" else name for name in COMMANDS]
)
def test_what_a_disk_does_not_take_is_named_and_not_left(name: str, trained: Path, tmp_path: Path, capsys) -> None:
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    words, file = COMMANDS[name]
    places = {"RUN": trained / "run", "TEXT": trained / "text.txt", "NEW": tmp_path}
    for place, path in places.items():
        words = [word.replace(place, str(path)) for word in words]
    with files_up_to(900):
        assert command(words) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"subquad: error: {tmp_path}")
    assert f"{file}: File too large" in said
    assert "give the same command again" in said
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {"data/tokenizer/kind.json"}, "what is whole may stay"
    assert command(words) == 0
    assert not list(tmp_path.rglob(".*"))


def test_an_evaluation_that_cannot_be_written_leaves_the_old_one(trained: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(trained / "run"), "--out", str(tmp_path / "result.json")]
    assert command(words) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    size = max(len(content) for content in before.values())
    with files_up_to(size - 1):  # one of the two files fits
        assert command(words) == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    process = next(number for number in range(99_999, 0, -1) if not is_alive(number))
    kept = [tmp_path / f".out.{os.getppid()}", tmp_path / ".out.txt", tmp_path / ".other.99999"]
    for path in (tmp_path / f".out.{process}", *kept):
        path.mkdir()
        (path / "half").touch()
    with new_folder(tmp_path / "out") as folder:
        (folder / "whole").touch()
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "out"])
    with pytest.raises(ValueError, match="exists already"), new_folder(tmp_path / "out"):
        pass
