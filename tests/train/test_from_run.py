"""Runs that begin with the weights of another one: what they take over, how they go on, what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.cli.main import run as command
from subquad.train.checkpoint import checkpoints, load_checkpoint, load_weights_of
from subquad.train.from_run import FROM_RUN
from subquad.train.metrics_log import read_metrics
from subquad.train.schedules import Schedule

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16, "dropout": 0.2, "norm": "pre"}
RECIPE: dict[str, Any] = {
    "task": "translation",
    "data": {
        "embedded": "phrases",
        "options": {"train": 120, "valid": 20, "test": 20},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
    },
    "model": {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": STACK},
    "optim": {"name": "adam", "ema": 0.9},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 4},
    "train": {"updates": 5, "validate_every": 100, "budget": {"max_tokens": 400}, "log_every": 1},
}
ANEW = ("optimizer", "schedule")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("runs") / "old"
    subquad.train(RECIPE, out=folder, quiet=True)
    return folder


def newest(run: Path) -> Any:
    return load_checkpoint(checkpoints(run / "checkpoints")[0])


def assert_same_bits(one: Path, other: Path) -> None:
    """Two runs stand at the same update with the same weights, moments, averages and generators."""
    ours, theirs = newest(one), newest(other)
    assert ours.state.update == theirs.state.update
    assert ours.state.cursor == theirs.state.cursor
    for part in ("model", "optimizer", "ema", "rng"):
        mine, its = getattr(ours, part), getattr(theirs, part)
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            assert torch.equal(value, its[name]), (part, name)


def test_without_a_change_it_goes_on_as_the_other_run_would(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old, tmp_path / "went-on")
    subquad.train(tmp_path / "went-on/recipe.yaml", "train.updates=9", quiet=True)
    subquad.train(from_run=old, checkpoint="last", train={"updates": 9}, out=tmp_path / "new", quiet=True)
    assert_same_bits(tmp_path / "new", tmp_path / "went-on")


def test_it_begins_anew_with_the_weights_that_validation_used(old: Path, tmp_path: Path) -> None:
    """Fine-tuning, interrupted or not: another dropout and schedule, first update and first moments."""
    changes: Any = {"model": {"encoder": {"dropout": 0.4}}, "schedule": {"lr": 3e-3}, "checkpoints": {"keep_every": 1}}
    for name, ends in {"at-once": (4,), "interrupted": (1, 4)}.items():
        for updates in ends:
            given = changes | {"train": {"updates": updates, "validate_every": 1}}
            run = subquad.train(from_run=old, reset=ANEW, out=tmp_path / name, quiet=True, **given)
            # another limit is another recipe, but one that a run can go on with
    assert_same_bits(tmp_path / "at-once", tmp_path / "interrupted")
    first, second = reversed(checkpoints(tmp_path / "at-once/checkpoints")[-2:])
    (before,) = checkpoints(old / "checkpoints")
    for name, value in load_weights_of(before).items():
        assert torch.equal(value, load_weights_of(first)[name]), name
        assert torch.equal(value, load_checkpoint(first).model[name]), "the moving average becomes the weights"
    assert {int(value) for name, value in load_checkpoint(second).optimizer.items() if "step" in name} == {1}
    rates = [record["lr"] for record in read_metrics(tmp_path / "at-once/metrics.jsonl", "train")]
    schedule = Schedule(run.recipe.schedule, 4, None)
    assert rates == [schedule.learning_rate(update, 0) for update in range(4)]
    assert run.recipe.model["encoder"]["dropout"] == 0.4
    assert run.updates == 4


def test_the_schedule_alone_or_the_optimiser_alone(old: Path, tmp_path: Path) -> None:
    subquad.train(from_run=old, reset=["schedule"], train={"updates": 1}, out=tmp_path / "schedule", quiet=True)
    subquad.train(from_run=old, reset=["optimizer"], train={"updates": 6}, out=tmp_path / "optimizer", quiet=True)
    for name, updates, steps in (("schedule", 1, 6), ("optimizer", 6, 1)):
        found = newest(tmp_path / name)
        assert found.state.update == updates
        assert {int(value) for key, value in found.optimizer.items() if "step" in key} == {steps}


def test_tokens_keep_their_numbers_on_other_data(old: Path, tmp_path: Path) -> None:
    for split in ("train", "valid"):
        for side, word in (("src", "km"), ("tgt", "Kilometer")):
            (tmp_path / f"{split}.{side}").write_text(f"5 {word}\n42 {word} {word}\n" * 8)
    files = {split: [str(tmp_path / f"{split}.{side}") for side in ("src", "tgt")] for split in ("train", "valid")}
    new = tmp_path / "new"
    run = subquad.train(from_run=old, reset=ANEW, data={"splits": files}, train={"updates": 1}, out=new, quiet=True)
    before = subquad.load_run(old)
    for side in ("source", "target"):
        assert run.tokenizer(side).fingerprint() == before.tokenizer(side).fingerprint()
    assert "embedded" not in {name for name, value in run.recipe.data if value}, "new data takes the place of the old"
    shutil.move(new, tmp_path / "moved")
    subquad.train(tmp_path / "moved/recipe.yaml", "train.updates=2", quiet=True)
    assert str(new) not in (tmp_path / "moved/recipe.yaml").read_text()


def test_the_first_checkpoint_need_not_be_there_yet(old: Path, tmp_path: Path) -> None:
    """A run that was killed before it saved anything begins with the same weights, also by its own recipe."""
    for name in ("one", "two"):
        given: Any = {"reset": ANEW, "train": {"updates": 1}, "out": tmp_path / name, "quiet": True}
        subquad.train(from_run=old, **given)
    shutil.rmtree(tmp_path / "two/checkpoints")
    subquad.train(tmp_path / "two/recipe.yaml", out=tmp_path / "two", quiet=True)
    assert_same_bits(tmp_path / "one", tmp_path / "two")


def test_a_run_that_has_begun_does_not_need_the_other_one(old: Path, tmp_path: Path) -> None:
    other, new = tmp_path / "other", tmp_path / "new"
    shutil.copytree(old, other)
    subquad.train(from_run=other, reset=ANEW, train={"updates": 1}, out=new, quiet=True)
    shutil.rmtree(other)
    assert subquad.train(new / "recipe.yaml", "train.updates=2", out=new, quiet=True).updates == 2


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert command(["train", *map(str, words)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    return line


def test_the_command_begins_and_goes_on(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new"
    words = ["train", "--from-run", str(old), "--reset", "optimizer,schedule", "train.updates=1", "--out", str(new)]
    assert command(words) == 0
    shown = capsys.readouterr().err
    assert f"begins at update 0 with the weights of {old / 'checkpoints/update-000000005'}" in shown
    assert "optimizer and schedule begin anew" in shown
    assert command([word.replace("updates=1", "updates=2") for word in words]) == 0
    assert "resumed at update 1" in capsys.readouterr().err
    assert json.loads((new / FROM_RUN).read_text())["reset"] == ["optimizer", "schedule"]
    other = said(capsys, "--from-run", old, "--reset", "schedule", "train.updates=3", "--out", new)
    assert "began with --from-run" in other
    assert "--reset optimizer,schedule" in other
    assert "did not begin with" in said(capsys, "--from-run", new, "train.updates=3", "--out", old)


def test_what_does_not_fit_is_refused_by_name(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new"
    begin = ["--from-run", old, "--out", new]
    shape = said(capsys, *begin, "model.encoder.ffn_dim=8")
    assert "encoder.blocks.0.ffn.fc1.weight is (16, 16), expected (8, 16)" in shape
    assert "give --reset optimizer" in said(capsys, *begin, "optim.name=nag")
    assert "leave the option out" in said(capsys, *begin, "data.tokenizer.vocab_size=400")
    assert "not 'optimiser'; did you mean 'optimizer'?" in said(capsys, *begin, "--reset", "optimiser")
    assert "--out" in said(capsys, "--from-run", old)
    assert "cannot begin with itself" in said(capsys, "--from-run", old, "--out", old)
    assert "is no run" in said(capsys, "--from-run", tmp_path / "none", "--out", new)
    assert "give from_run, too" in said(capsys, old / "recipe.yaml", "--reset", "schedule", "--out", new)
    assert command(["average", str(old), "update-000000005"]) == 0
    assert "give --reset optimizer" in said(capsys, *begin, "--checkpoint", "average")
    assert (
        command(["train", *map(str, begin), "--checkpoint", "average", "--reset", "optimizer", "train.updates=6"]) == 0
    )
