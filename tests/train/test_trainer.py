"""Training runs: what they leave behind, how they go on, how they end, how they refuse."""

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from subquad.cli.main import run as command
from subquad.models import build_model
from subquad.progress import TrainingProgress
from subquad.tasks.base import Task
from subquad.train.checkpoint import checkpoints, load_checkpoint
from subquad.train.diagnostics.nan_diagnosis import NotFiniteError, load_failure
from subquad.train.distributed import ALONE, Workers, validate
from subquad.train.metrics_log import read_metrics
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import build_task, differences, locked, open_run
from subquad.train.trainer import Trainer

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16, "dropout": 0.2, "norm": "pre"}
SCHEDULE = {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 4}
RECIPES: dict[str, dict[str, Any]] = {
    "image-classification": {
        "data": {"embedded": "digits"},
        "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": STACK},
        "train": {"budget": {"max_sentences": 200}, "smoothing": 0.1},
    },
    "translation": {
        "data": {
            "embedded": "phrases",
            "options": {"train": 120, "valid": 20, "test": 20},
            "tokenizer": {"kind": "bpe", "vocab_size": 300},
        },
        "model": {
            "preset": "translation_small",
            "dim": 16,
            "shared_embedding": True,
            "encoder": STACK,
            "decoder": STACK,
        },
        "train": {"budget": {"max_tokens": 400}, "accumulate": 2, "smoothing": 0.1},
    },
}


def recipe(task: str, **train: Any) -> Recipe:
    data = RECIPES[task]
    options = {**data, "task": task, "schedule": SCHEDULE, "train": {**data["train"], **train}}
    return Recipe.parse("recipe", options | {"optim": {"name": "adam", "ema": 0.9}})


def trainer(given: Recipe, run: Path, task: Task | None = None, workers: Workers = ALONE) -> Trainer:
    task = task or build_task(given, run / "data")
    return Trainer(given, task, run, TrainingProgress(stream=io.StringIO()), [], workers)


def said(given: Trainer) -> str:
    assert isinstance(given.progress.stream, io.StringIO)
    return given.progress.stream.getvalue()


def assert_equal(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == other.keys()
    for name, value in ours.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("task", RECIPES)
def test_an_interrupted_run_ends_as_the_uninterrupted_one(task: str, tmp_path: Path) -> None:
    """Dropout on, in the middle of an epoch: weights, optimiser, average and generators are the same bits."""
    whole = recipe(task, updates=9, validate_every=3)
    trainer(whole, tmp_path / "whole").fit()
    trainer(recipe(task, updates=6, validate_every=3), tmp_path / "parts").fit()
    torch.manual_seed(99)  # what happened in between does not matter
    trainer(whole, tmp_path / "parts").fit()
    first, second = (load_checkpoint(checkpoints(tmp_path / name / "checkpoints")[0]) for name in ("whole", "parts"))
    assert first.state.update == second.state.update == 9
    assert_equal(first.model, second.model)
    assert_equal(first.optimizer, second.optimizer)
    assert_equal(first.rng, second.rng)
    assert first.ema is not None
    assert second.ema is not None
    assert_equal(first.ema, second.ema)
    assert first.state.cursor == second.state.cursor
    assert first.state.metrics == second.state.metrics


@pytest.mark.parametrize("task", RECIPES)
def test_training_learns_and_logs(task: str, tmp_path: Path) -> None:
    given = recipe(task, updates=40, log_every=10, validate_every=20)
    trained = trainer(given, tmp_path)
    before = validate(trained.task, trained.loss, trained.loader, "valid")
    after = trained.fit()
    assert after["loss"] < before["loss"]
    logged = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["update"] for record in logged if record["event"] == "train"] == [10, 20, 30, 40]
    assert [record["update"] for record in logged if record["event"] == "valid"] == [20, 40]
    assert ("ppl" in after) == (task == "translation")
    assert ("top1" in after) == (task != "translation")


def test_metrics_do_not_depend_on_the_batches(tmp_path: Path) -> None:
    """Loss of a split: the mean over its targets, however they are batched."""
    given = recipe("translation", updates=1)
    trained = trainer(given, tmp_path)
    samples = trained.task.samples("valid", training=False)
    trained.model.eval()
    with torch.no_grad():
        losses = [trained.task.loss(trained.model, samples.batch(torch.tensor([i]).numpy())) for i in range(20)]
    mean = sum(float(loss.nll) for loss in losses) / sum(loss.count for loss in losses)
    assert validate(trained.task, trained.loss, trained.loader, "valid")["loss"] == pytest.approx(mean, rel=1e-5)


def test_training_ends_at_the_first_of_its_limits(tmp_path: Path) -> None:
    by_epochs = trainer(recipe("image-classification", epochs=2), tmp_path / "epochs")
    by_epochs.fit()
    assert by_epochs.update == 2 * len(by_epochs.plan.epoch(0))
    by_updates = trainer(recipe("image-classification", updates=3, epochs=9), tmp_path / "updates")
    by_updates.fit()
    assert by_updates.update == 3
    assert said(by_updates).startswith("the warm-up of 4 updates is longer than the run of 3: ")
    assert "warm-up" not in said(by_epochs)
    short = trainer(recipe("image-classification", epochs=1, accumulate=4), tmp_path / "short")
    short.fit()
    assert said(short).startswith(f"the warm-up of 4 updates is longer than the run of {short.update}: ")
    impatient = trainer(recipe("image-classification", epochs=50, patience=1), tmp_path / "patience")
    impatient.fit()
    assert impatient.bad_validations == 1
    assert impatient.cursor.epoch < 50


@pytest.mark.parametrize(
    ("limits", "schedule", "reason", "text"),
    [
        ({"updates": 3}, {}, "train.updates", "train.updates is 3"),
        ({"epochs": 1}, {}, "train.epochs", "train.epochs is 1"),
        ({"minutes": 2}, {}, "train.minutes", "train.minutes is 2"),
        ({"epochs": 50, "patience": 1}, {"lr": 5}, "train.patience", "train.patience is 1"),
        ({"updates": 99}, {"stop_lr": 8e-3}, "schedule.stop_lr", "schedule.stop_lr is 0.008"),
    ],
)
def test_a_run_says_why_it_ended(limits, schedule, reason, text, tmp_path: Path, monkeypatch) -> None:
    given = recipe("image-classification", **limits)
    given = read_recipe(given, [{"schedule": schedule, "optim": {"ema": 0}}])
    trained = trainer(given, tmp_path)
    monkeypatch.setattr(trained, "_minutes", lambda: float(trained.update))  # a minute for each update
    trained.fit()
    assert f"update {trained.update:,}: the training ends, " in said(trained)
    assert text in said(trained)
    (record,) = read_metrics(tmp_path / "metrics.jsonl", "end")
    assert (record["reason"], record["update"]) == (reason, trained.update)
    again = trainer(given, tmp_path)
    again.fit()
    assert text in said(again)
    assert len(read_metrics(tmp_path / "metrics.jsonl", "end")) == 1, "nothing was trained, so nothing ended"


def test_checkpoints_are_saved_by_time(tmp_path: Path) -> None:
    kept = {"checkpoints": {"every_minutes": 1e-9, "keep_last": 9}}
    trained = trainer(read_recipe(recipe("image-classification", updates=4), [kept]), tmp_path / "often")
    trained.fit()
    found = checkpoints(tmp_path / "often" / "checkpoints")
    assert [path.name for path in found] == [f"update-{number:09d}" for number in (4, 3, 2, 1)]
    states = [load_checkpoint(path).state for path in found]
    assert [bool(state.metrics) for state in states] == [True, False, False, False], "only the last was validated"
    rare = {"checkpoints": {"every_minutes": 60, "keep_last": 9}}
    trainer(read_recipe(recipe("image-classification", updates=4), [rare]), tmp_path / "rare").fit()
    assert len(checkpoints(tmp_path / "rare" / "checkpoints")) == 1


def test_every_generator_follows_the_seed_and_the_process(tmp_path: Path) -> None:
    """Not the mechanism, whatever its weights have drawn; one of a user's may draw from numpy or Python."""

    def draws(seed: int, rank: int, mixer: str = "softmax") -> tuple[float, ...]:
        given = recipe("image-classification", updates=1, accumulate=2, seed=seed)
        given = read_recipe(given, [f"model.encoder.mixer={mixer}"])
        task = build_task(given, tmp_path / "data")
        random.seed(rank)
        np.random.seed(rank)
        workers = Workers(rank, 1)  # no other process is needed to see what this one draws
        trainer(given, tmp_path / f"{seed}-{rank}-{mixer}", task, workers)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draws(1, 0)
    assert draws(1, 0) == draws(1, 0, "performer") == first
    for other in (draws(2, 0), draws(1, 1)):
        assert all(ours != theirs for ours, theirs in zip(first, other, strict=True))


def test_numbers_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    trained = trainer(recipe("image-classification", updates=5), tmp_path)
    with torch.no_grad():
        trained.model.get_parameter("encoder.blocks.0.ffn.fc2.weight").fill_(torch.inf)
    weights = {name: value.clone() for name, value in trained.model.state_dict().items()}
    with pytest.raises(NotFiniteError, match=r"encoder\.blocks\.0\.ffn\.fc2"):
        trained.fit()
    assert_equal(dict(trained.model.state_dict()), weights)
    batch, _, _ = load_failure(tmp_path / "failure" / next((tmp_path / "failure").iterdir()).name)
    assert set(batch) == {"images", "labels"}


def test_a_run_directory_belongs_to_one_recipe(tmp_path: Path) -> None:
    given = recipe("image-classification", updates=5)
    assert open_run(recipe("image-classification", updates=5, seed=2), tmp_path / "run") is False
    assert open_run(given, tmp_path / "run") is False, "nothing was learned: the corrected recipe takes its place"
    (tmp_path / "run" / "checkpoints" / "update-000000005").mkdir(parents=True)
    assert open_run(recipe("image-classification", updates=50), tmp_path / "run") is True, "longer is fine"
    with pytest.raises(ValueError, match=r"another recipe \(train\.seed differ\)"):
        open_run(recipe("image-classification", updates=5, seed=3), tmp_path / "run")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert differences({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}) == ["a.b", "a.c"]


def test_one_process_trains_in_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, run = tmp_path / "tiny.yaml", tmp_path / "run"
    given.write_text(yaml.safe_dump(recipe("image-classification", updates=1).model_dump(mode="json")))
    with locked(run):
        assert command(["train", str(given), "--out", str(run)]) == 1
        assert f"process {os.getpid()} trains in {run}; wait until it ends" in capsys.readouterr().err
    assert command(["train", str(given), "--out", str(run)]) == 0
    (run / "recipe.yaml").write_text("task: [")
    assert command(["train", str(given), "--out", str(run)]) == 1
    assert f"{run / 'recipe.yaml'} is not YAML" in capsys.readouterr().err


def test_the_command_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {**RECIPES["image-classification"], "task": "image-classification", "schedule": SCHEDULE}
    data["train"] = {**data["train"], "updates": 3}
    path, run = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(data))
    assert command(["train", str(path), "--out", str(run)]) == 0
    assert "after 3 updates" in capsys.readouterr().out
    assert command(["train", str(path), "train.updates=5", "--out", str(run)]) == 0
    captured = capsys.readouterr()
    assert "after 5 updates" in captured.out
    assert "resumed at update 3" in captured.err
    assert command(["train", str(path), "model.encoder.mixer=linformr", "--out", str(run)]) == 1
    assert "did you mean 'linformer'" in capsys.readouterr().err
    assert command(["train", str(path), "train.udpates=5"]) == 1
    assert "did you mean 'updates'" in capsys.readouterr().err
    assert command(["train", str(tmp_path / "none.yaml")]) == 1
    assert "there is no recipe" in capsys.readouterr().err


def test_a_task_refuses_models_and_data_of_another_kind() -> None:
    data = {**RECIPES["translation"], "task": "translation", "schedule": SCHEDULE}
    data["train"] = {**data["train"], "updates": 1}
    with pytest.raises(ValueError, match="task translation trains models of kind encoder-decoder, not vision"):
        Recipe.parse("recipe", data | {"model": {"preset": "vision_small"}})
    with pytest.raises(ValueError, match="holds images; task translation needs pairs"):
        build_task(Recipe.parse("recipe", data | {"data": {"embedded": "digits"}}), Path("unused"))
    with pytest.raises(ValueError, match="lara cannot be causal"):
        Recipe.parse("recipe", data | {"model": {"preset": "translation_small", "decoder": {"mixer": "lara"}}})
    assert build_model("translation_small").config.decoder.mixer.name == "softmax"
