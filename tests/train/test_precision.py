"""float16: its scale, updates that are skipped and said to be, divergence that ends a run; what `auto` stands for."""

import math
from pathlib import Path

import pytest
import torch

from subquad.train.checkpoint import best, checkpoints, load_checkpoint
from subquad.train.diagnostics.nan_diagnosis import NotFiniteError
from subquad.train.metrics_log import read_metrics
from subquad.train.precision import GROWTH_INTERVAL, MAX_SKIPPED, MEAN_SCALE, LossScale, choose_precision
from tests.train.test_trainer import assert_equal, recipe, said, trainer

TASK = "image-classification"
OVERFLOWS = 2.0**60
"""A scale at which every gradient of float16 is infinite."""
FFN = "encoder.blocks.0.ffn.fc2.weight"
slow_on_a_cpu = pytest.mark.filterwarnings("ignore:train.precision is float16 on a CPU")


def test_the_scale_of_a_sum_is_that_of_a_mean_loss() -> None:
    assert LossScale.of_sum(1).scale == LossScale.of_sum(0).scale == MEAN_SCALE
    assert LossScale.of_sum(1000).scale == MEAN_SCALE / 1024
    assert LossScale.of_sum(2.0**20).scale == 1 / 16


def test_the_scale_follows_the_gradients() -> None:
    scale = LossScale(8.0)
    assert scale.update(1.0, math.inf)
    assert (scale.scale, scale.in_a_row, scale.skipped) == (4.0, 1, 1)
    assert scale.update(math.nan, math.nan), "a loss that is not finite"
    assert (scale.scale, scale.in_a_row, scale.skipped) == (4.0, 2, 2), "is not the scale's fault"
    for _ in range(GROWTH_INTERVAL):
        assert not scale.update(1.0, 1.0)
    assert (scale.scale, scale.in_a_row, scale.skipped) == (8.0, 0, 2)
    other = LossScale(1.0)
    other.restore(scale.state())
    assert other == scale


@slow_on_a_cpu
def test_a_healthy_run_skips_no_update(tmp_path: Path) -> None:
    """From the first one on, though the loss is a sum; and it stays near float32."""
    losses = {}
    for precision in ("float16", "float32"):
        trained = trainer(recipe(TASK, updates=6, log_every=1, precision=precision), tmp_path / precision)
        trained.fit()
        assert "skipped" not in said(trained)
        records = read_metrics(tmp_path / precision / "metrics.jsonl", "train")
        losses[precision] = [record["train_loss"] for record in records]
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.02)
    last = read_metrics(tmp_path / "float16" / "metrics.jsonl", "train")[-1]
    assert (last["loss_scale"], last["skipped"]) == (MEAN_SCALE / 128, 0), "updates of about 180 images"


@slow_on_a_cpu
def test_skipped_updates_change_nothing_and_are_said(tmp_path: Path) -> None:
    trained = trainer(recipe(TASK, updates=99, log_every=1, precision="float16"), tmp_path)
    assert trained.updater.scale is not None
    trained.updater.scale.scale = OVERFLOWS
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    updates = trained.updates()
    for _ in range(2):
        next(updates)
    assert_equal(dict(trained.model.state_dict()), before)
    assert trained.updater.ema is not None
    assert_equal(trained.updater.ema.weights, before)
    assert not trained.updater.optimizer.state
    assert trained.update == 0, "as in fairseq, a batch whose gradient overflows is no update"
    assert trained.cursor.batch == 2, "but it was read"
    assert (
        "after update 0: a batch is skipped, its gradient is not finite in float16; the loss scale is now "
        f"{OVERFLOWS / 4:g} (2 of {MAX_SKIPPED} in a row, 2 in all)"
    ) in said(trained)
    records = read_metrics(tmp_path / "metrics.jsonl", "skipped")
    assert [(record["update"], record["skipped"]) for record in records] == [(0, 1), (0, 2)]
    assert not read_metrics(tmp_path / "metrics.jsonl", "train")
    trained.updater.scale.scale = 1.0
    next(updates)
    (record,) = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert (record["update"], record["skipped"]) == (1, 2)
    assert record["lr"] == trained.schedule.learning_rate(0), "the curve waits for the first update, too"
    assert (trained.updater.scale.in_a_row, trained.updater.scale.skipped) == (0, 2)
    next(updates)  # the rate of the first one is 0
    with pytest.raises(AssertionError):
        assert_equal(dict(trained.model.state_dict()), before)


@slow_on_a_cpu
def test_a_run_that_diverged_in_float16_stops_with_a_diagnosis(tmp_path: Path) -> None:
    trained, name = trainer(recipe(TASK, updates=150, validate_every=5, precision="float16"), tmp_path), FFN
    assert trained.updater.ema is not None
    with torch.no_grad():
        trained.model.get_parameter(name).fill_(1e6)  # finite, but not in float16
        trained.updater.ema.weights[name].fill_(1e6)
    with pytest.raises(NotFiniteError, match=rf"after {MAX_SKIPPED} skipped updates in a row.*encoder\.blocks\.0\.ffn"):
        trained.fit()
    assert trained.update == 0
    assert trained.best is None
    assert "valid" not in said(trained)
    assert best(tmp_path / "checkpoints", trained.best_metric) == []


@slow_on_a_cpu
def test_an_interrupted_run_in_float16_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    """Batches are skipped before the interruption, and the scale goes on where it was."""
    ends = {}
    for name, parts in (("whole", (6,)), ("parts", (3, 6))):
        for updates in parts:
            trained = trainer(recipe(TASK, updates=updates, validate_every=3, precision="float16"), tmp_path / name)
            assert trained.updater.scale is not None
            trained.updater.scale.scale = 2.0**17  # too large for a few updates
            trained.fit()
        ends[name] = load_checkpoint(checkpoints(tmp_path / name / "checkpoints")[0])
    first, second = ends["whole"], ends["parts"]
    assert first.state.scaler == second.state.scaler
    assert first.state.scaler["skipped"] > 3
    assert_equal(first.model, second.model)
    assert_equal(first.optimizer, second.optimizer)
    assert_equal(first.rng, second.rng)


def test_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_precision("auto", cpu) == "float32"
    for has_bfloat16, chosen in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation, has=has_bfloat16: has)
        assert choose_precision("auto", gpu) == chosen
    assert choose_precision("float16", gpu) == "float16"
    with pytest.warns(UserWarning, match="float16 on a CPU, which is several times slower"):
        assert choose_precision("float16", cpu) == "float16"


def test_a_run_says_that_its_precision_changed(tmp_path: Path) -> None:
    trainer(recipe(TASK, updates=1), tmp_path).fit()
    resumed = trainer(recipe(TASK, updates=2, precision="bfloat16"), tmp_path)
    resumed.fit()
    assert "trained in float32 so far, and goes on in bfloat16" in said(resumed)
