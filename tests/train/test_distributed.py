"""Several processes under torchrun, replicated and sharded, against one with the same batches in each update."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from subquad.cli.main import run as command
from subquad.data.batches import BatchPlan
from subquad.models import build_from_config
from subquad.train.checkpoint import Checkpoint, checkpoints, load_checkpoint
from subquad.train.distributed import DistributedLoss, Workers
from subquad.train.metrics_log import read_metrics
from subquad.train.recipe import read_recipe
from subquad.train.run import build_task
from tests.train.test_trainer import recipe, trainer

pytestmark = pytest.mark.usefixtures("preloaded_programs")

STACK = {"layers": 2, "heads": 2, "ffn_dim": 16, "dropout": 0.0, "norm": "pre"}
# Attention does not depend on the bias of its keys: Adam would follow the sign of rounding errors there.
PLAIN = {"name": "softmax", "qkv_bias": False}
RECIPE: dict[str, Any] = {
    "task": "translation",
    "data": {
        "embedded": "phrases",
        "options": {"train": 120, "valid": 20, "test": 20},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
    },
    "model": {
        "preset": "translation_small",
        "dim": 16,
        "shared_embedding": True,
        "source": {"dropout": 0.0},
        "target": {"dropout": 0.0},
        "encoder": {**STACK, "mixer": "lightconv"},
        "decoder": {**STACK, "mixer": {**PLAIN, "name": "softmax,primal"}, "cross": PLAIN},
    },
    "optim": {"name": "adam", "ema": 0.9},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 4},
    "train": {"updates": 12, "validate_every": 4, "budget": {"max_tokens": 220}, "accumulate": 2, "smoothing": 0.1},
}
MODES = {"replicated": "train.sharded=false", "sharded": "train.sharded=true"}
ROOT = Path(__file__).parents[2]


def torchrun(*words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(start, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)


def train(*words: str, processes: int = 2) -> None:
    done = torchrun("-m", "subquad.cli.main", "train", *words, processes=processes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("updates") == 1, "one process speaks"


def newest(run: Path) -> Checkpoint:
    return load_checkpoint(checkpoints(run / "checkpoints")[0])


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def alone(given: Path) -> Path:
    """A run of one process, with one thread as those under torchrun have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert command(["train", str(given), "--out", str(given.parent / "alone")]) == 0
    torch.set_num_threads(threads)
    read = read_recipe(given)
    sizes = build_task(read, given.parent / "alone" / "data").samples("train", training=True).sizes
    batches = BatchPlan(*sizes, budget=read.train.budget, seed=read.train.seed).epoch(0)
    assert len(batches) % 2, "the last update of an epoch has one batch"
    return given.parent / "alone"


def parts_of(checkpoint: Checkpoint) -> dict[str, dict[str, torch.Tensor]]:
    assert checkpoint.ema is not None
    return {"model": checkpoint.model, "optimizer": checkpoint.optimizer, "ema": checkpoint.ema}


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_are_one_and_take_turns_with_it(mode: str, given: Path, alone: Path, tmp_path: Path) -> None:
    """Two processes begin, one goes on, two end. Replicas: the bits of one process, for two summands have no order.

    An epoch has an odd number of batches, so its last update leaves one process without any.
    """
    run = tmp_path / "run"
    train(str(given), MODES[mode], "train.updates=4", "--out", str(run))
    assert [record["update"] for record in read_metrics(run / "metrics.jsonl", "valid")] == [4]
    assert {name.split(".")[0] for name in newest(run).rng} >= {"torch", "rank1"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert command(["train", str(given), MODES[mode], "train.updates=8", "--out", str(run)]) == 0
    torch.set_num_threads(threads)
    train(str(given), MODES[mode], "--out", str(run))
    ours, other = newest(run), newest(alone)
    assert ours.state.cursor == other.state.cursor
    assert ours.state.cursor["epoch"] > 0
    assert ours.state.metrics["loss"] == pytest.approx(other.state.metrics["loss"], rel=1e-6)
    expected = parts_of(other)
    for part, tensors in parts_of(ours).items():
        assert tensors.keys() == expected[part].keys()
        for name, value in tensors.items():
            largest = expected[part][name].abs().max()
            # shards end elsewhere in the vectors of the optimiser's kernel, whose last elements are rounded otherwise
            limit = 1e-6 * largest if mode == "sharded" else 0.0
            assert (value - expected[part][name]).abs().max() <= limit, f"{part} {name}"


@pytest.mark.nightly  # two processes are tried every time
@pytest.mark.parametrize("mode", MODES)
def test_four_processes_are_one(mode: str, given: Path, tmp_path: Path) -> None:
    """Four summands have an order: equal to rounding. Some tensors have fewer rows than there are processes."""
    changes = ["train.accumulate=4", "train.updates=4", MODES[mode]]
    assert command(["train", str(given), *changes, "--out", str(tmp_path / "one")]) == 0
    train(str(given), *changes, "--out", str(tmp_path / "four"), processes=4)
    ours, other = newest(tmp_path / "four"), newest(tmp_path / "one")
    assert ours.state.cursor == other.state.cursor
    assert ours.state.metrics["loss"] == pytest.approx(other.state.metrics["loss"], rel=1e-6)
    for name, value in ours.model.items():
        difference = (value - other.model[name]).abs().max()
        assert difference <= 1e-5 * other.model[name].abs().max(), f"{name}: {difference}"


def test_what_processes_hold_and_find_out() -> None:
    """Equal weights to the bit with draws of their own, norms of shards, numbers that are not finite."""
    done = torchrun("-m", "tests.train.in_processes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is well") == 2


def test_a_mistake_ends_all_processes(given: Path, tmp_path: Path) -> None:
    done = torchrun("-m", "subquad.cli.main", "train", str(given), "train.budget.max_tokens=2", "--out", str(tmp_path))
    assert done.returncode != 0
    assert "more than max_tokens=2" in done.stderr


def test_batches_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make it a multiple of 4"):
        trainer(recipe("translation", updates=1), tmp_path, workers=Workers(0, 4))


def test_skipped_blocks_cannot_be_sharded() -> None:
    stack = {**STACK, "layer_drop": 0.1}
    model = build_from_config({"kind": "language-model", "vocab": 9, "dim": 16, "decoder": stack})
    with pytest.raises(ValueError, match=r"train\.sharded: layer_drop"):
        DistributedLoss(model, lambda *_: pytest.fail("not called"), Workers(0, 2), sharded=True)


def test_weights_of_another_block_cannot_be_sharded() -> None:
    mixer = {"name": "linformer", "share_kv": True, "share_layers": True}
    stack = {**STACK, "layers": 2, "mixer": mixer}
    model = build_from_config({"kind": "masked-language-model", "vocab": 9, "dim": 16, "encoder": stack})
    with pytest.raises(ValueError, match=r"train\.sharded: share_layers"):
        DistributedLoss(model, lambda *_: pytest.fail("not called"), Workers(0, 2), sharded=True)
