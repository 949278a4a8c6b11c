"""The profile of a training: phases that add up, operators, a file, and no trace in the run."""

import json
import time
from pathlib import Path

import pytest
import yaml

from subquad.cli.main import run as command
from subquad.train.diagnostics.profiler import MODEL, OTHER, Phases, profile_updates
from tests.train.test_trainer import RECIPES, SCHEDULE


def test_phases_hold_the_time_that_was_spent_in_them() -> None:
    phases = Phases()

    def advance() -> None:
        with phases("data"):
            time.sleep(0.004)
        with phases("forward"):
            time.sleep(0.02)
        time.sleep(0.002)

    found = profile_updates(advance, phases, updates=4)
    assert found.phases["data"] >= 4 * 0.004
    assert found.phases["forward"] >= 4 * 0.02
    assert found.phases[OTHER] >= 4 * 0.002
    assert found.phases["backward"] == 0
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert found.model_share == pytest.approx(found.phases["forward"] / found.seconds)
    before = dict(phases.seconds)
    advance()
    assert phases.seconds == before, "measured only while a profile runs"


def test_the_command_writes_a_profile_and_leaves_the_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {**RECIPES["translation"], "task": "translation", "schedule": SCHEDULE}
    data["train"] = {**data["train"], "updates": 2}
    path, run = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(data))
    assert command(["train", str(path), "--out", str(run)]) == 0
    log, kept = (run / "metrics.jsonl").read_text(), sorted((run / "checkpoints").iterdir())
    capsys.readouterr()
    assert command(["train", str(path), "--profile", "3", "--out", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "in the model (forward, backward, optimiser)" in shown
    assert "aten::" in shown
    written = json.loads((run / "profile.json").read_text())
    assert written["updates"] == 3
    assert sum(written["shares"].values()) == pytest.approx(1)
    assert written["model_share"] == pytest.approx(sum(written["shares"][name] for name in MODEL))
    assert all(written["phases"][name] > 0 for name in ("data", *MODEL))
    assert written["operators"][0]["milliseconds"] >= written["operators"][-1]["milliseconds"] > 0
    assert (run / "metrics.jsonl").read_text() == log
    assert sorted((run / "checkpoints").iterdir()) == kept
