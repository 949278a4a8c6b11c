"""benchmarks/decode.py: it runs, and every table it promises has checked results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.mixers import available, mixer_class

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.decode"]


def test_every_part_has_results(tmp_path: Path) -> None:
    command = [*COMMAND, "--quick", "--threads", "1", "--json", str(tmp_path / "all.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [
        line for part in json.loads((tmp_path / "all.json").read_text())["parts"].values() for line in part["results"]
    ]
    assert {line["table"] for line in lines} == {
        "translation",
        "language-float32",
        "language-int8",
        "rows",
        "growth",
        "growth-state",
    }
    assert not [line for line in lines if line["reason"]]
    assert "MISSED" not in done.stdout  # nothing is expected of toy sizes
    constant = {name for name in available() if "O(1)" in mixer_class(name).capabilities.state}
    sizes = {line["labels"]["mechanism"]: line["score"] for line in lines if line["table"] == "growth-state"}
    assert constant <= sizes.keys()
    assert all(sizes[name] == 1 for name in constant)
    assert sizes["softmax"] > 2


def test_a_run_needs_texts(tmp_path: Path) -> None:
    command = [*COMMAND, "--run", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--run needs --source FILE and --references FILE" in done.stderr
