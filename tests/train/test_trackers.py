"""Trackers through their real programs, without a network: what TensorBoard and Weights & Biases have written."""

import importlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from subquad.cli.main import run as command
from subquad.train.metrics_log import read_metrics
from subquad.train.run import load_trained
from subquad.train.trackers import TrackConfig, build_trackers, fetch, local_run
from tests.preloaded import preloaded
from tests.train.test_trainer import RECIPES, SCHEDULE

pytest.importorskip("babel", reason="the embedded phrases need the demo extra")

RECIPE = {
    **RECIPES["translation"],
    "task": "translation",
    "schedule": SCHEDULE,
    "train": {**RECIPES["translation"]["train"], "updates": 4, "validate_every": 2, "log_every": 1},
}


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases keeps copies and settings in the user's home; here it has another one, and nobody logged in."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home / name.lower()))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def train(folder: Path, track: dict[str, Any], *changes: str) -> Path:
    """Trains by the command; returns the run directory."""
    path, run = folder / "tiny.yaml", folder / "run 1"
    path.write_text(yaml.safe_dump({**RECIPE, "track": track}))
    assert command(["train", str(path), *changes, "--out", str(run)]) == 0
    return run


# ---------------------------------------------------------------------- TensorBoard


def test_tensorboard_has_the_metrics(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tmp_path, {"tensorboard": True})
    events = accumulators.EventAccumulator(str(run / "tensorboard")).Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(run / "metrics.jsonl"):
        for name, value in record.items():
            if name not in ("event", "update", "time") and not isinstance(value, str):
                expected.setdefault(f"{record['event']}/{name}", []).append((record["update"], value))
    assert set(events.Tags()["scalars"]) == set(expected)
    assert [update for update, _ in expected["train/loss"]] == [1, 2, 3, 4]
    assert [update for update, _ in expected["valid/loss"]] == [2, 4]
    for tag, values in expected.items():
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [update for update, _ in found] == [update for update, _ in values]
        assert [value for _, value in found] == pytest.approx([value for _, value in values])  # float32 there


def test_tensorboard_has_the_recipe_and_hyperparameters(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run = train(tmp_path, {"tensorboard": True})
    events = accumulators.EventAccumulator(str(run / "tensorboard")).Reload()
    (text,) = events.Tensors("recipe/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(shown) == yaml.safe_load((run / "recipe.yaml").read_text())
    found = {}
    for tag, content in events.summary_metadata.items():
        if content.plugin_data.plugin_name == "hparams":
            found[tag] = HParamsPluginData.FromString(content.plugin_data.content)
    started = found["_hparams_/session_start_info"].session_start_info.hparams
    assert started["train.updates"].number_value == 4
    assert started["task"].string_value == RECIPE["task"]
    named = {one.name.tag for one in found["_hparams_/experiment"].experiment.metric_infos}
    assert "valid/loss" in named <= set(events.Tags()["scalars"])


FULL = """
import resource, sys, warnings
from pathlib import Path
from subquad.train.metrics_log import MetricsLog
from subquad.train.trackers import TrackConfig, build_trackers

folder = Path(sys.argv[1])
log = MetricsLog(folder / "metrics.jsonl")
(tracker,) = build_trackers(TrackConfig(tensorboard=True), folder, {})
(events,) = (folder / "tensorboard").iterdir()
resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 200,) * 2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for update in range(1, 6):
        tracker.log("train", update, {f"m{i}": 1.0 for i in range(20)})
    tracker.close()
log.write("train", 5, {"loss": 1.0})
print([str(warning.message) for warning in said])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limits there")
def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with preloaded():
        result = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("TensorBoard failed and is left alone from now on: [Errno 27]") == 1
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["update"] == 5


# ---------------------------------------------------------------------- Weights & Biases


def records(run: Path) -> list[Any]:
    """What offline runs hold. Their files are whole a moment after `finish`: another process writes them."""
    for _ in range(200):
        found = [list(stored(file)) for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb"))]
        if found and all(each and kind(each[-1]) == "exit" for each in found):
            return [record for each in found for record in each]
        time.sleep(0.1)
    raise AssertionError(f"{run} holds no finished offline run")


def stored(file: Path) -> Iterator[Any]:
    """Messages in the blocks of LevelDB's log, after a header of seven bytes."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    block, head = 1 << 15, 7
    data = file.read_bytes()
    position, message = head, b""
    while position + head <= len(data):
        if block - position % block < head:  # too little room for a record: the block ends with zeros
            position += block - position % block
            continue
        _, size, part = struct.unpack_from("<IHB", data, position)
        position += head + size
        message += data[position - size : position]
        if part in (1, 4):  # whole, or the last part
            yield messages.Record.FromString(message)
            message = b""


def kind(record: Any) -> str:
    return record.WhichOneof("record_type")


def history(found: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in found:
        if kind(record) == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


def test_wandb_has_the_metrics_and_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    track = {"wandb": "subquad-test", "wandb_mode": "offline"}
    run = train(tmp_path, track)
    train(tmp_path, track, "train.updates=6")  # goes on with the same run
    written = records(run)
    runs = [record.run for record in written if kind(record) == "run"]
    identity = (run / "wandb-id.txt").read_text().strip()
    assert {(each.run_id, each.project, each.display_name) for each in runs} == {(identity, "subquad-test", "run 1")}
    assert json.loads({item.key: item.value_json for item in runs[0].config.update}["task"]) == "translation"
    expected = [
        {"update": record["update"]}
        | {f"{record['event']}/{name}": value for name, value in record.items() if name not in ("event", "time")}
        for record in read_metrics(run / "metrics.jsonl")
        if record["event"] in ("train", "valid")
    ]
    found = history(written)
    assert [row["update"] for row in found] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    for ours, theirs in zip(expected, found, strict=True):
        del ours[f"{'valid' if 'valid/loss' in ours else 'train'}/update"]
        assert ours == pytest.approx(theirs)
    assert not [record for record in written if kind(record) == "artifact"], "nobody asked for one"


def staged(run: Path, into: Path) -> Any:
    """The artifact that an offline run would upload, put where a download would put it."""
    (record,) = [record for record in records(run) if kind(record) == "artifact"]
    for entry in record.artifact.manifest.contents:
        (into / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(entry.local_path, into / entry.path)
    return record.artifact


@pytest.fixture
def fetched(tmp_path: Path) -> tuple[Path, Path, Any]:
    """A run, the folder of its artifact, and the artifact."""
    pytest.importorskip("wandb")
    run = train(tmp_path, {"wandb": "subquad-test", "wandb_mode": "offline", "wandb_artifacts": True})
    return run, tmp_path / "fetched", staged(run, tmp_path / "fetched")


def test_an_artifact_is_a_run(fetched: tuple[Path, Path, Any]) -> None:
    run, folder, artifact = fetched
    assert (artifact.name, artifact.type) == ("run-1", "model")
    best = min(read_metrics(run / "metrics.jsonl", "valid"), key=lambda record: record["loss"])
    described = json.loads(artifact.metadata)
    assert (described["update"], described["loss"]) == (best["update"], best["loss"])
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"recipe.yaml", "environment.json", "inputs.json", "metrics.jsonl"} <= names
    assert {"tokenizers/source/kind.json", "tokenizers/target/kind.json"} <= names
    assert not [name for name in names if name.startswith(("data/", "wandb"))]
    checkpoint = f"checkpoints/update-{best['update']:09d}"
    assert {name.rpartition("/")[0] for name in names if "checkpoints" in name} == {checkpoint}
    ours, theirs = load_trained(run), load_trained(folder)
    assert theirs.update == best["update"]
    assert all((value == theirs.model.state_dict()[name]).all() for name, value in ours.model.state_dict().items())
    assert theirs.tokenizer("target").fingerprint() == ours.tokenizer("target").fingerprint()


def test_an_artifact_can_be_gone_on_with(fetched: tuple[Path, Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, artifact = fetched
    recipe = str(folder.parent / "tiny.yaml")
    capsys.readouterr()
    assert command(["train", recipe, "train.updates=6", "track.wandb=null", "--out", str(folder)]) == 0
    assert f"resumed at update {json.loads(artifact.metadata)['update']}" in capsys.readouterr().err


def test_an_artifact_can_be_evaluated(fetched: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a stand-in: it knows one artifact, and a download copies its files, as the client's does."""
    run, folder, _ = fetched

    class Stored:
        name = "run-1:v0"

        def download(self, root: str) -> str:
            return str(shutil.copytree(folder, root))

    known = {"me/subquad-test/run-1:latest": Stored()}
    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace(artifact=known.__getitem__))
    monkeypatch.chdir(folder.parent)
    assert command(["evaluate", "wandb:me/subquad-test/run-1:latest", "--split", "valid"]) == 0
    assert command(["evaluate", str(run), "--split", "valid"]) == 0
    here, there = (json.loads((path / "evaluation-valid.json").read_text()) for path in (run, Path("runs/run-1-v0")))
    assert here["metrics"] == there["metrics"]


def test_without_a_login_training_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with pytest.warns(RuntimeWarning, match=r"Weights & Biases failed and is left alone .* No API key") as said:
        run = train(tmp_path, {"wandb": "subquad-test", "wandb_artifacts": True})
    assert len([warning for warning in said if warning.category is RuntimeWarning]) == 1
    assert all(math.isfinite(record["loss"]) for record in read_metrics(run / "metrics.jsonl", "train"))
    assert len(read_metrics(run / "metrics.jsonl", "train")) == 4


def test_references_to_artifacts(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert local_run("runs/wandb") == Path("runs/wandb")
    for wrong in ("wandb:run", "wandb:me/project/run", "wandb:a/b/c/d:v1"):
        with pytest.raises(ValueError, match="names no artifact"):
            fetch(wrong, tmp_path)
    with pytest.raises(ValueError, match=r"^the artifact me/project/run:v3 cannot be fetched: [^\n]*$"):
        fetch("wandb:me/project/run:v3", tmp_path)  # nobody is logged in


@pytest.mark.parametrize(
    ("options", "module", "name"),
    [({"tensorboard": True}, "torch.utils.tensorboard", "tensorboard"), ({"wandb": "project"}, "wandb", "wandb")],
)
def test_a_missing_tracker_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs the package {name}: pip install 'subquad\[track\]'"):
        build_trackers(TrackConfig.parse("track", options), tmp_path, {})
    assert build_trackers(TrackConfig(), tmp_path, {}) == []
    assert os.listdir(tmp_path) == ["home"]
