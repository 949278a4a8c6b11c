"""How long a comparison would take."""

from pathlib import Path

import pytest

from subquad.cli.main import run as command
from subquad.compare.dry_run import estimate_times, plan_mechanisms
from subquad.train.recipe import read_recipe

pytestmark = pytest.mark.usefixtures("preloaded_programs")

EPOCHS = ["train.updates=null", "train.epochs=2", "schedule.kind=constant"]


def test_epochs_are_counted_on_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,297 images in batches of 64 are 21 batches, two of which are an update; every pass takes a minute here."""
    pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
    monkeypatch.setattr("subquad.compare.dry_run._seconds", lambda _: 60.0)
    recipe = read_recipe("digits", [*EPOCHS, "train.budget.max_sentences=64", "train.accumulate=2"])
    longer = {"lightconv": {"train": {"epochs": 3}}, "eva": {"train": {"updates": 5}}}
    planned = plan_mechanisms(recipe, ["softmax", "lightconv", "eva"], options=longer, floors=False)
    found = [time.minutes_each for time in estimate_times(recipe, planned, tune=0)]
    assert found == [2 * 11 * 2, 3 * 11 * 2, 5 * 2]


def test_epochs_of_missing_data_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    splits = [f"data.splits.{split}={tmp_path / split}.txt" for split in ("train", "valid", "test")]
    words = ["compare", "own_text", *splits, *EPOCHS, "--mixers", "lightconv", "--no-floors", "--dry-run"]
    assert command(words) == 0
    shown = capsys.readouterr().out
    assert [line.split()[-1] for line in shown.splitlines()[2:4]] == ["unknown", "unknown"]
    assert "nothing is known of trainings that are as long as epochs of it" in shown
