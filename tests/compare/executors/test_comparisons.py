"""Whole comparisons on engines, as people start them: a worker is killed while it trains, and no number changes."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from subquad.cli.main import run as command
from subquad.compare.locks import lock_path
from subquad.compare.report.result import Result, read_result
from subquad.environment import machine
from subquad.train.checkpoint import checkpoints

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
ROOT = Path(__file__).parents[3]
RECIPE = "digits"
ENGINES = {"ray": ["--executor", "ray"], "slurm": ["--executor", "slurm", "--executor-options", "cluster=local"]}


PACKAGES = {"ray": "ray", "slurm": "submitit"}


def require(engine: str) -> None:
    """Skips without the engine's package, which is not imported: Ray reads its settings when it is."""
    if importlib.util.find_spec(PACKAGES[engine]) is None:
        pytest.skip("the extra cluster is not installed")


def words(out: Path, updates: int, mixers: str) -> list[str]:
    changes = [f"train.updates={updates}", "train.validate_every=20", "schedule.warmup_updates=1"]
    measured = ["--mixers", mixers, "--seeds", "1", "--no-floors", "--lengths", "", "--out", str(out)]
    return ["compare", RECIPE, *changes, *measured]


def numbers(result: Result) -> list[object]:
    """Everything that trainings computed, besides times."""
    curves = [[(point.update, point.loss, point.value) for point in trial.curve] for trial in result.trials]
    return [[trial.status for trial in result.trials], [trial.scores for trial in result.trials], curves]


@pytest.mark.usefixtures("preloaded_programs")
def test_trials_are_jobs_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("slurm")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    assert command([*words(out, 2, "softmax"), *ENGINES["slurm"]]) == 0
    (trial,) = read_result(out / "result.json").trials
    assert (trial.status, trial.setting["machine"], trial.setting["threads"]) == ("done", machine(), 1)
    assert list((out / "slurm").glob("*_result.pkl"))


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_killed_while_it_trains_changes_no_number(engine: str, tmp_path: Path) -> None:
    require(engine)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    out, local = tmp_path / "out", tmp_path / "local"
    line = [sys.executable, "-m", "subquad", *words(out, 120, "softmax,lightconv"), *ENGINES[engine]]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT) as process:
        end = time.monotonic() + 300
        while not checkpoints(out / "trials/softmax-seed1/checkpoints"):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.05)
        lock = lock_path(out, "softmax, seed 1").read_text()
        os.kill(int(lock.partition(" process ")[2].split()[0]), signal.SIGKILL)
        _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert "softmax, seed 1: its worker was lost" in said
    assert "resumed at update" in (out / "trials/softmax-seed1/log.txt").read_text()
    here = [sys.executable, "-m", "subquad", *words(local, 120, "softmax,lightconv")]
    subprocess.run(here, check=True, env=env, cwd=ROOT, capture_output=True)
    assert numbers(read_result(out / "result.json")) == numbers(read_result(local / "result.json"))


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_trials_of_searches_run_on_engines(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(engine)
    pytest.importorskip("optuna", reason="tuning needs the extra tune")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    assert command([*words(out, 18, "softmax,lightconv"), "--tune", "3", *ENGINES[engine]]) == 0
    result = read_result(out / "result.json")
    assert [len(search.trials) for search in result.tuning] == [3, 3]
    assert all(search.chosen for search in result.tuning)
    assert [trial.status for trial in result.trials] == ["done", "done"]
