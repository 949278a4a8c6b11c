"""Whole comparisons as people run them: trials in processes of their own, interrupted, shared, failing, taken over."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from subquad.cli.main import run as command
from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.measure.swap import SwapPoint
from subquad.compare.report.conclusions import conclude
from subquad.compare.report.learning import below_linear, learned_nothing
from subquad.compare.report.result import Result, read_result
from subquad.train.checkpoint import checkpoints, read_state
from tests.signals import interruptible

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[2]
DIGITS = ["digits", "train.updates=2", "schedule.warmup_updates=1"]
MIXERS = ["--mixers", "eva,linformer", "--set", "linformer.max_length=4"]  # images of 16 patches are longer than that
MEASURED = ["--lengths", "16,64", "--tokens", "64", "--rounds", "1"]
ONE_SEED = ["--seeds", "1"]


def compared(out: Path, *more: str, mixers: list[str] = MIXERS, measured: list[str] = MEASURED) -> int:
    return command(["compare", *DIGITS, *mixers, *measured, *ONE_SEED, "--out", str(out), *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trials that end well, and one that fails."""
    out = tmp_path_factory.mktemp("comparison") / "out"
    assert compared(out) == 1, "a failed training makes the exit code, after everything else"
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out", symlinks=True))


def times_of(out: Path) -> dict[str, int]:
    """When every file of the computed pieces was written."""
    parts = [path for name in ("trials", "measurements") for path in (out / name).rglob("*")]
    return {str(path.relative_to(out)): path.lstat().st_mtime_ns for path in parts if path.is_file()}


def status(result: Result) -> dict[str, str]:
    return {f"{trial.mechanism} {trial.seed}": trial.status for trial in result.trials}


# ---------------------------------------------------------------------- one comparison


def test_every_part_is_there_and_a_failure_is_shown(finished: Path) -> None:
    result = read_result(finished / "result.json")
    assert status(result) == {
        "softmax 1": "done",
        "eva 1": "done",
        "linformer 1": "failed",
        "no mixing 1": "done",
    }
    failed = result.trials[2]
    assert (
        failed.reason == "training: linformer: length 16 is above the maximum of 4; build it with max_length=16 or more"
    )
    for trial in result.trials[:2]:
        assert set(trial.scores) == {"top-1", "top5"}
        assert trial.scores["top-1"].samples == 250
        assert 0 <= trial.scores["top-1"].value <= 100
        assert [point.update for point in trial.curve] == [2]
        assert trial.curve[-1].seconds == pytest.approx(trial.training_seconds)
        assert trial.peak_bytes is not None
        assert trial.peak_bytes > 50 << 20
        assert (finished / str(trial.per_sample)).is_file()
    assert result.metric.chance_level == pytest.approx(10 + 200 * math.sqrt(0.1 * 0.9 / 250)), "ten classes"
    assert result.trials[0].data_order == result.trials[1].data_order is not None
    assert result.covariance is not None
    assert result.covariance.trials == [("softmax", 1), ("eva", 1), ("no mixing", 1)]
    assert result.covariance.samples == 250
    share = result.trials[0].scores["top-1"].value / 100
    assert result.covariance.values[0][0] == pytest.approx(100**2 * share * (1 - share) / 249), "of a share, in percent"
    assert [epoch.mechanism for epoch in result.epochs] == ["softmax", "eva", "no mixing"]
    assert result.epochs[0].updates == 22, "1,297 images: 20 batches of 64, one of 16, and the last one"
    assert "--mixers eva,linformer --set linformer.max_length=4" in result.command
    assert "--seeds 1, --match parameters --split test" in result.command
    page = (finished / "report.html").read_text()
    assert "linformer (seed 1) failed: training: linformer: length 16 is above the maximum of 4" in page


def test_numbers_carry_the_config_of_what_was_measured(finished: Path) -> None:
    result = read_result(finished / "result.json")
    eva = result.trials[1].config["encoder"]
    assert (eva["name"], eva["window"], eva["landmarks"], eva["dims"]) == ("eva", 2, 4, 2), "the recipe's own options"
    points = {
        (point.mechanism, point.part, point.length): point for point in result.points(LengthPoint) if not point.control
    }
    assert set(points) == {
        (label, part, length) for label in result.competitors for part in ("encoder", "full") for length in (16, 64)
    }
    for (label, part, length), point in points.items():
        assert point.status == "done", point.reason
        assert point.config["encoder"]["name"] == label
        assert point.batch == (64 if length == 16 else 1), "a training's batch at the task's own length"
        assert point.setting["tokens"] == point.batch * length
        assert point.training is not None
        assert len(point.training.rounds) == 1
        assert point.training_bytes is not None
        assert point.inference_bytes is not None
        assert point.training_bytes > point.inference_bytes
        assert point.flops is not None
        if part == "full":
            alone = points[label, "encoder", length]
            assert point.parameters > alone.parameters  # type: ignore[operator]
            assert point.flops > alone.flops  # type: ignore[operator]
    assert points["linformer", "full", 64].config["encoder"]["max_length"] == 64, "room for the longest"
    softmax = [points["softmax", "encoder", length] for length in (16, 64)]
    by_token = [point.flops / (point.batch * point.length) for point in softmax]  # type: ignore[operator]
    assert by_token[1] > by_token[0], "attention grows with the length"


def test_mechanisms_are_swapped_into_the_trained_baseline(finished: Path) -> None:
    points = {point.mechanism: point for point in read_result(finished / "result.json").points(SwapPoint)}
    assert list(points) == ["softmax", "eva", "linformer"], "no mixing is a reference"
    softmax, eva, linformer = points.values()
    assert softmax.loss_before == softmax.baseline_loss == eva.baseline_loss
    assert (softmax.status, eva.status, eva.updates) == ("done", "done", 1)
    assert (linformer.status, linformer.loss_before) == ("refused", None)
    assert "length 16 is above the maximum of 4" in str(linformer.reason)
    assert [reference.reason for reference in softmax.references] == [None, None]
    found = [softmax.loss_after, eva.loss_before, eva.loss_after]
    found += [loss for one in softmax.references for loss in (one.loss_before, one.loss_after)]
    assert None not in found


def test_floors_are_beside_the_mechanisms(finished: Path) -> None:
    result = read_result(finished / "result.json")
    assert [mechanism.label for mechanism in result.mechanisms if mechanism.floor] == ["no mixing"]
    assert [floor.name for floor in result.floors] == ["majority class", "linear probe"]
    assert result.floors[1].value > 90


def test_a_second_call_computes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = times_of(finished)
    assert compared(finished) == 1, "what failed is not tried again unasked"
    assert times_of(finished) == before
    shown = capsys.readouterr()
    assert "eva, seed 1" not in shown.err.rpartition("error:")[0]
    assert shown.out.startswith("mechanism")
    assert str(finished / "report.html") in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "eva.window=4"], "holds another comparison (eva.options.window, "),
        (["train.updates=3"], "recipe.train.updates differ"),
        (["--set", "eva.schedule.lr=1e-2"], "eva.settings.schedule.lr differ"),
        (["--set", "eva.schedule.rl=1e-2"], "eva: schedule has no option 'rl'"),
        (["--match", "none"], "(match, "),
        (["--match", "parameter"], "--match parameter: choose parameters or none; did you mean 'parameters'?"),
        (["--mixers", "hybrid=softmax*5,primal"], "mixer pattern 'softmax*5,primal' has 6 layers; the stack has 2"),
        (["--tokens", "128"], "tokens differ"),
        (["--split", "valid"], "split differ"),
        (["--split", "tset"], "no split 'tset'; did you mean 'test'?"),
        (["--mixers", "evva"], "no mechanism is called 'evva'; did you mean 'eva'?"),
        (["--mixers", "eva"], "eva is there 2 times; give labels"),
        (["--set", "lara.landmarks=3"], "an option of lara is set, but nothing is called so"),
        (["--shard", "3/2"], "write K/N with K from 1 to N"),
        (["--seeds", "0"], "give how many (3), or which (1,2,3)"),
        (["--lengths", "16,many"], "'many' is not a whole number"),
        (["--lengths", "128"], "a batch of 64 tokens holds no sequence of 128"),
        (["--rounds", "1,2,3,4"], "times are looked at one to three times"),
        (
            ["--merge", "--baseline", "lara"],
            "is none of the mechanisms that are compared: softmax, eva, linformer, no",
        ),
    ],
)
def test_other_comparisons_and_mistakes_are_refused(
    finished: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "comparison.json").read_bytes()
    assert compared(finished, *words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert (finished / "comparison.json").read_bytes() == before


def test_a_dry_run_shows_the_plan_and_computes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["--mixers", "lightconv", "--mixers", "hybrid=eva*1,softmax", "--set", "eva.schedule.lr=1e-2"]
    assert command(["compare", *DIGITS, "--mixers", "eva", *words, "--out", str(out), "--dry-run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:7]] == [
        ["softmax", "softmax"],
        ["eva", "eva"],
        ["lightconv", "lightconv"],
        ["hybrid", "eva*1,softmax"],
        ["no", "mixing"],
    ]
    assert "schedule.lr=0.01" in rows[3]
    assert rows[4][3].startswith("model.encoder.ffn_dim="), "as many parameters as softmax has"
    assert rows[2][-6:-1] == ["1,", "2,", "3", "0", "3"], "three seeds by default, and no tuning"
    assert float(rows[2][-1]) >= 0, "minutes"
    assert rows[8][0] == "About"
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- pieces


def test_shares_and_their_merge_are_the_whole(finished: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second of three trials is not evaluated yet: its share does that and nothing else, and makes no result."""
    whole = read_result(finished / "result.json")
    for name in ("trials/eva-seed1/trial.json", "trials/eva-seed1/evaluation.json", "result.json", "report.html"):
        (copied / name).unlink()
    shutil.rmtree(copied / "measurements")
    assert compared(copied, "--merge") == 1
    missing = read_result(copied / "result.json")
    assert status(missing)["eva 1"] == "missing"
    assert missing.points(LengthPoint) == []
    assert "Not trained yet: eva (seed 1)." in capsys.readouterr().out
    (copied / "result.json").unlink()
    before = times_of(copied)
    assert compared(copied, "--shard", "2/3") == 0
    after = times_of(copied)
    assert not (copied / "result.json").exists()
    assert not (copied / "measurements").exists(), "lengths belong to the first share"
    new = {name for name in after if after[name] != before.get(name)}
    assert {Path(name).parent.name for name in new if "checkpoints" not in name} == {"eva-seed1"}
    assert not any("checkpoints" in name for name in new), "the run was finished"
    assert compared(copied, "--merge") == 1
    merged = read_result(copied / "result.json")
    assert [trial.scores for trial in merged.trials] == [trial.scores for trial in whole.trials]
    assert merged.covariance == whole.covariance


def test_a_finished_run_is_a_trial(copied: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(copied / "trials" / "eva-seed1", tmp_path / "mine", symlinks=False))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    shutil.rmtree(copied / "measurements")
    assert (
        compared(
            copied,
            "--run",
            f"mine={run}",
            measured=["--lengths", "", "--tokens", "64", "--rounds", "1"],
        )
        == 1
    )
    result = read_result(copied / "result.json")
    assert status(result)["mine 1"] == "done"
    trials = {trial.mechanism: trial for trial in result.trials}
    assert trials["mine"].scores == trials["eva"].scores
    assert trials["mine"].config == trials["eva"].config
    assert trials["mine"].data_order == trials["eva"].data_order
    assert {path: path.stat().st_mtime_ns for path in before} == before, "the run stays as it was"


def test_trials_of_another_comparison_are_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied / "trials" / "eva-seed1" / "trial.json"
    content: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "key": "another"}))
    assert compared(copied) == 1
    assert "eva-seed1 was made by another recipe or comparison" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_demo_ends_with_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["demo", "--updates", "60", "--seeds", "1", "--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["softmax", "lightconv", "eva"]
    assert "Demo: a language model of bytes" in (tmp_path / "demo" / "report.html").read_text()


@pytest.mark.nightly
def test_every_mechanism_of_the_demo_passes_the_floors(tmp_path: Path) -> None:
    assert command(["demo", "--out", str(tmp_path / "demo")]) == 0
    result = read_result(tmp_path / "demo" / "result.json")
    assert [trial.status for trial in result.trials] == ["done"] * 12
    assert {floor.name for floor in result.floors} == {"unigram", "bigram"}
    for label in result.competitors:
        assert learned_nothing(result, label) is None
        assert below_linear(result, label) is None
    assert not conclude(result)[0].text.startswith("No answer")


# ---------------------------------------------------------------------- interruption


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)]
)
def test_an_interrupted_comparison_goes_on(number: int, code: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["compare", *DIGITS, "train.updates=400", "train.validate_every=5", "--mixers", "softmax"]
    words += [*ONE_SEED, "--no-floors", "--lengths", "", "--out", str(out)]
    line = [sys.executable, "-m", "subquad.cli.main", *words]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible)
    metrics = out / "trials" / "softmax-seed1" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and '"valid"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)  # to the comparison alone, which has to tell its trial
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    kept = "what was computed and trained is kept, and the same command goes on from it"
    assert said.endswith(f"subquad: interrupted: {kept}\n")
    saved = checkpoints(out / "trials" / "softmax-seed1" / "checkpoints")[0]
    log = (out / "trials" / "softmax-seed1" / "log.txt").read_text()
    assert log.endswith(
        f"interrupted: update {read_state(saved).update:,} is kept, and the same command goes on from it\n"
    )
    assert not (out / "trials" / "softmax-seed1" / "trial.json").exists()
    assert list((out / "locks").iterdir()) == [], "no lock is left"
    (out / "trials" / "softmax-seed1" / "log.txt").rename(tmp_path / "first.txt")
    # the rest of its 400 updates is not what this is about
    updates = 5 * metrics.read_text().count('"valid"') + 10
    given = json.loads((out / "comparison.json").read_text())
    given["recipe"]["train"]["updates"] = updates
    (out / "comparison.json").write_text(json.dumps(given))
    words[words.index("train.updates=400")] = f"train.updates={updates}"
    assert command(words) == 0
    assert "resumed at update" in (out / "trials" / "softmax-seed1" / "log.txt").read_text()
    (trial,) = read_result(out / "result.json").trials
    assert trial.status == "done"
    assert [point.update for point in trial.curve] == list(range(5, updates + 1, 5))
    seconds = [point.seconds for point in trial.curve]
    assert seconds == sorted(seconds, key=float)  # type: ignore[arg-type]
    assert os.path.relpath(out / str(trial.run), out) == "trials/softmax-seed1"


# ---------------------------------------------------------------------- tuned


@pytest.mark.nightly
def test_tuned_mechanisms_are_trained_with_what_was_found(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="tuning needs the extra tune")
    out = tmp_path / "out"
    tuned = {"mixers": ["--mixers", "local", "--no-floors"], "measured": ["--lengths", ""]}
    assert compared(out, "--tune", "2", **tuned) == 0
    result = read_result(out / "result.json")
    assert [(search.mechanism, len(search.trials)) for search in result.tuning] == [("softmax", 2), ("local", 2)]
    for search, mechanism in zip(result.tuning, result.mechanisms, strict=True):
        assert search.trials[0].settings["schedule.lr"] == 2e-3, "the recipe's own settings come first"
        assert mechanism.options["schedule.lr"] == search.chosen["schedule.lr"]
        recipe = (out / "trials" / f"{search.mechanism}-seed1" / "recipe.yaml").read_text()
        assert f"lr: {search.chosen['schedule.lr']}" in recipe
    assert not list(out.glob("tuning/*/checkpoints")), "weights of a search are of no use"
    before = times_of(out)
    assert compared(out, "--tune", "2", **tuned) == 0
    assert times_of(out) == before, "nothing is computed twice"
    assert compared(out, "--tune", "3", **tuned) == 1, "another search is another comparison"
