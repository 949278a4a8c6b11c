"""Two processes under torchrun against one with the same batches in each update."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from subquad.cli.main import run as command
from subquad.train.checkpoint import Checkpoint, checkpoints, load_checkpoint
from subquad.train.log import read_metrics

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")

STACK = {"layers": 1, "heads": 2, "hidden": 16, "dropout": 0.0, "norm": "pre"}
RECIPE: dict[str, Any] = {
    "task": "image-classification",
    "data": {"embedded": "digits"},
    "model": {"preset": "vision_small", "patch": 4, "dim": 16, "encoder": STACK},
    "optim": {"name": "adam", "clip": 1.0},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 4},
    "train": {"updates": 8, "validate_every": 4, "budget": {"max_sentences": 200}, "accumulate": 2},
}


def torchrun(*words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [*start, "-m", "subquad.cli.main", "train", *words]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300, check=False)


def newest(run: Path) -> Checkpoint:
    return load_checkpoint(checkpoints(run / "checkpoints")[0])


def assert_close(ours: Checkpoint, other: Checkpoint) -> None:
    """Sums of two processes are rounded in another order."""
    assert ours.state.update == other.state.update
    assert ours.state.cursor == other.state.cursor
    for name, value in ours.model.items():
        torch.testing.assert_close(value, other.model[name], atol=1e-5, rtol=1e-4, msg=name)
    assert ours.state.metrics["loss"] == pytest.approx(other.state.metrics["loss"], rel=1e-4)


def test_two_processes_train_as_one_and_resume_each_other(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    # one process, up to the end: what the others are held against
    alone = tmp_path / "alone"
    assert command(["train", str(path), "--out", str(alone)]) == 0
    both = tmp_path / "both"
    done = torchrun(str(path), "train.updates=4", "--out", str(both))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after 4 updates") == 1, "one process speaks"
    assert [record["update"] for record in read_metrics(both / "metrics.jsonl", "valid")] == [4]
    assert {name.split(".")[0] for name in newest(both).rng} >= {"torch", "rank1"}
    done = torchrun(str(path), "--out", str(both))
    assert done.returncode == 0, done.stderr
    assert "resumed at update 4" in done.stderr
    assert_close(newest(both), newest(alone))


def test_batches_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    done = torchrun(str(path), "train.accumulate=1", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "make it a multiple of 2" in done.stderr


def test_a_mistake_ends_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"data": {"embedded": "phrases"}}))
    done = torchrun(str(path), "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "holds pairs; task image-classification needs images" in done.stderr
