"""One file adds a task: `majority.py`, found through its entry point, is trained, evaluated and compared."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.usefixtures("preloaded_programs")

FILE = Path(__file__).with_name("majority.py")
RECIPE = {
    "task": "majority",
    "data": {"length": 7, "samples": 128},
    "model": {
        "kind": "text-classifier",
        "vocab": 2,
        "num_classes": 2,
        "dim": 16,
        "encoder": {"layers": 1, "heads": 2, "ffn_dim": 32, "norm": "pre", "mixer": "softmax"},
    },
    "schedule": {"kind": "constant", "lr": 1e-2},
    "train": {"updates": 60, "budget": {"max_tokens": 224}},
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder of packages in which one file and its entry point are installed."""
    shutil.copy(FILE, tmp_path / "somebodys_task.py")
    installed = tmp_path / "somebodys_task-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-task\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[subquad.tasks]\nmajority = somebodys_task\n")
    (tmp_path / "majority.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def subquad(package: Path, *words: str) -> str:
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "subquad", *words]
    done = subprocess.run(command, cwd=package, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_and_evaluates(package: Path) -> None:
    subquad(package, "train", "majority.yaml", "--dry-run")
    subquad(package, "train", "majority.yaml", "--out", "run")
    assert "95 % interval" in subquad(package, "evaluate", "run")
    found = json.loads((package / "run" / "evaluation-test.json").read_text())
    assert (found["task"], found["samples"], found["lost"]) == ("majority", 128, 0)
    assert found["metrics"]["top1"]["value"] > 0.9


@pytest.mark.nightly
def test_it_is_compared(package: Path) -> None:
    words = [
        "--mixers",
        "softmax,performer",
        "--out",
        "compared",
        "--lengths",
        "16",
        "--tokens",
        "32",
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--no-floors",
    ]
    subquad(package, "compare", "majority.yaml", "train.updates=20", *words)
    found = json.loads((package / "compared" / "result.json").read_text())
    assert (found["metric"]["name"], found["metric"]["chance_level"]) == ("share of right answers", 50.0)
    statuses = {trial["mechanism"]: trial["status"] for trial in found["trials"]}
    assert statuses == {"softmax": "done", "performer": "done"}
    assert {
        (point["mechanism"], point["part"]) for point in found["measurements"]["lengths"] if point["status"] == "done"
    } == {(mechanism, part) for mechanism in ("softmax", "performer") for part in ("encoder", "full")}
