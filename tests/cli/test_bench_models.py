"""`subquad bench` of recipes and presets: what it reports follows from what it measured."""

import csv
import json
from pathlib import Path

import pytest

from subquad.cli.main import run

ROOT = Path(__file__).parents[2]


def test_an_epoch_and_a_run_follow_from_the_timed_updates(tmp_path: Path, capsys) -> None:
    out = tmp_path / "costs.json"
    words = ["--mixers", "softmax,recipe", "--updates", "3", "--out", str(out)]
    assert run(["bench", "--recipe", "digits", *words]) == 0
    printed = capsys.readouterr().out
    assert "extrapolated from 3 updates" in printed
    rows = json.loads(out.read_text())["rows"]
    assert [row["mechanism"] for row in rows] == ["softmax", "recipe"]
    for row in rows:
        assert row["timed_updates"] == 3
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["epoch_seconds"] == row["seconds"] * row["epoch_updates"]
        assert row["run_seconds"] == row["seconds"] * row["run_updates"]
        assert row["peak_bytes"] > 1000
    assert {row["epoch_updates"] for row in rows} == {22}, "20 batches of 64, then 16 and 1"


def test_a_recipe_is_measured_after_changes(capsys) -> None:
    words = ["--mixers", "recipe", "--updates", "1", "--json"]
    assert run(["bench", "--recipe", "digits", *words, "model.dim=16", "train.budget.max_sentences=700"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["changes"] == ["model.dim=16", "train.budget.max_sentences=700"]
    assert report["rows"][0]["epoch_updates"] == 3, "two batches of 648 and one of 1"


def test_a_preset_by_length(tmp_path: Path) -> None:
    out = tmp_path / "lengths.csv"
    words = ["--lengths", "32,16", "--tokens", "64", "--repeats", "1", "--part", "encoder", "--out", str(out)]
    assert run(["bench", "--preset", "lm_small", "--set", "decoder.layers=1", *words]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["length"], row["batch"]) for row in rows] == [("16", "4"), ("32", "2")]
    assert all(float(row["training_seconds"]) > 0 and int(row["training_bytes"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "digits", "--set", "model.dim=16"], "with --recipe, changes stand alone"),
        (["--recipe", "digits", "model.dims=16"], "did you mean 'dim'"),
        (["model.dim=16"], "changes are for a recipe, which --recipe names"),
        (["--preset", "lm_smal"], "did you mean 'lm_small'"),
        (["--preset", "lm_small", "--part", "decoder"], "--part decoder: choose encoder or full"),
        (["--preset", "lm_small", "--set", "decoder.layer=1", "--lengths", "16"], "did you mean 'layers'"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys) -> None:
    assert run(["bench", *words]) == 1
    assert message in capsys.readouterr().err
