"""A run of subquad is linearised with its own data, and the result is a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.cli.main import run
from subquad.train.checkpoint import load_weights_of

pytest.importorskip("sklearn")
SHORT: dict[str, Any] = {"transfer_updates": 3, "tune_updates": 3, "save_every": 2, "quiet": True}
MODEL = {"dim": 16, "encoder": {"mixer": "softmax", "layers": 2, "heads": 2, "ffn_dim": 16}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    subquad.train("digits", model=MODEL, train={"updates": 5}, schedule={"warmup_updates": 1}, out=folder, quiet=True)
    return folder


def test_the_result_is_a_run_with_a_report(teacher: Path, tmp_path: Path) -> None:
    found = subquad.linearise(teacher, "local=window=2", out=tmp_path / "out", **SHORT)
    names = [row["name"] for row in found.report["scores"]]
    assert names == ["teacher", "swapped", "transfer", "finetune", "scratch", "identity"]
    assert found.report["layers"] == ["local", "local"]
    result = subquad.load_run(tmp_path / "out/run", checkpoint="last")
    assert result.updates == 3
    assert result.recipe.task == "image-classification"
    assert subquad.evaluate(result, quiet=True).samples == 250
    assert all(torch.equal(value, found.model.state_dict()[name]) for name, value in result.model.state_dict().items())
    assert "after attention transfer" in (tmp_path / "out/report.md").read_text()


def test_transfer_begins_with_the_teachers_weights_and_trains_mixers_only(teacher: Path, tmp_path: Path) -> None:
    subquad.linearise(teacher, "local=window=2", out=tmp_path / "out", controls=False, **SHORT)
    before = subquad.load_run(teacher).model.state_dict()
    after = load_weights_of(tmp_path / "out/transfer/weights")
    same = {name for name, value in after.items() if name in before and torch.equal(value, before[name])}
    changed = after.keys() - same
    assert changed
    assert all(".mixer." in name for name in changed)
    losses = [json.loads(line) for line in (tmp_path / "out/transfer/metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["transfer"] < losses[0]["transfer"]


def test_a_window_over_the_whole_image_loses_nothing(teacher: Path, tmp_path: Path) -> None:
    found = subquad.linearise(
        teacher,
        "softmax,local=window=8",
        out=tmp_path / "out",
        tune="none",
        controls=False,
        transfer_updates=0,
        quiet=True,
    )
    assert found.score("swapped") == pytest.approx(found.score("teacher"), abs=1e-5)


def test_the_command_and_what_it_refuses(teacher: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["linearise", str(teacher), "--mixer", "local=window=2", "--transfer-updates", "1", "--tune-updates", "1"]
    assert run([*words, "--no-controls", "--out", str(tmp_path / "out")]) == 0
    assert "as a run" in capsys.readouterr().out
    assert run([*words, "--tune", "lora", "--out", str(tmp_path / "other")]) == 1
    assert "are for models of transformers" in capsys.readouterr().err
    assert run([*words, "--data", "digits", "--out", str(tmp_path / "other")]) == 1
    assert "learns from its own data" in capsys.readouterr().err
