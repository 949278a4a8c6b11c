"""A run of subquad is linearised with its own data, and the result is a run."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.api import linearise_dry_run
from subquad.cli.main import run
from subquad.linearise.stages.tasks import TaskBatches
from subquad.mixers import Mixer

pytest.importorskip("sklearn")
SHORT_UPDATES: dict[str, Any] = {"transfer_updates": 3, "tune_updates": 3, "save_every": 2}
SHORT: dict[str, Any] = {**SHORT_UPDATES, "quiet": True, "lengths": ()}
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


def test_transfer_trains_mixers_only_and_lowers_their_error(teacher: Path, tmp_path: Path) -> None:
    found = subquad.linearise(teacher, "local=window=2", out=tmp_path / "out", controls=False, tune="none", **SHORT)
    before, after = subquad.load_run(teacher).model.state_dict(), found.model.state_dict()
    changed = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert changed
    assert all(".mixer." in name for name in changed)
    assert all(after < before for before, after in found.report["transfer_errors"].values())


def test_a_window_over_the_whole_image_loses_nothing(teacher: Path, tmp_path: Path) -> None:
    found = subquad.linearise(
        teacher,
        "softmax,local=window=8",
        out=tmp_path / "out",
        tune="none",
        controls=False,
        transfer_updates=0,
        lengths=(),
        quiet=True,
    )
    assert found.score("swapped") == pytest.approx(found.score("teacher"), abs=1e-5)


FORMS: dict[str, dict[str, Any]] = {
    "a chosen layer kept, distilled": {"keep": 1, "distill": 1.0},
    "LoRA": {"tune": "lora"},
    "LoRA, distilled": {"tune": "lora", "distill": 1.0, "keep": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_kept_and_lora_and_distillation_train(form: str, teacher: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SHORT, **FORMS[form], "controls": form.startswith("a chosen")}
    if "tune" in options:
        pytest.importorskip("peft")
    found = subquad.linearise(teacher, "local=window=2", out=tmp_path / "out", **options)
    kept = options.get("keep", 0)
    assert sorted(found.report["layers"]) == ["local"] * (2 - kept) + ["softmax"] * kept
    assert len(found.report["layer_losses"]) == 2 * kept
    result = subquad.load_run(tmp_path / "out/run", checkpoint="last")
    mixers = [module.name for module in result.model.modules() if isinstance(module, Mixer)]
    assert mixers == found.report["layers"]
    assert not any("lora" in name for name in result.model.state_dict())
    lines = [json.loads(line) for line in (tmp_path / "out/finetune/metrics.jsonl").read_text().splitlines()]
    assert all(("kl" in line) == ("distill" in options) for line in lines)
    before, after = subquad.load_run(teacher).model.state_dict(), result.model.state_dict()
    outside = {name for name in before if ".mixer." not in name and not torch.equal(before[name], after[name])}
    assert any(".ffn." in name for name in outside)
    if "tune" in options:  # only linear maps outside of the mixers are changed
        assert all(name.endswith(".weight") and "norm" not in name for name in outside)


def test_what_was_interrupted_goes_on_bit_by_bit(teacher: Path, tmp_path: Path) -> None:
    whole = subquad.linearise(teacher, "local=window=2", out=tmp_path / "whole", controls=False, **SHORT)
    for at in (1, 4):
        with interrupted_at(at), pytest.raises(KeyboardInterrupt):
            subquad.linearise(teacher, "local=window=2", out=tmp_path / "parts", controls=False, **SHORT)
    parts = subquad.linearise(teacher, "local=window=2", out=tmp_path / "parts", controls=False, **SHORT)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in parts.model.state_dict().items())
    assert parts.report["scores"] == whole.report["scores"]


@contextmanager
def interrupted_at(update: int) -> Iterator[None]:
    """Somebody presses Ctrl-C when the batch of this update is made, counted over all stages."""
    make = TaskBatches.__getitem__

    def press(self: TaskBatches, number: int) -> Any:
        if number == update:
            signal.raise_signal(signal.SIGINT)
        return make(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskBatches, "__getitem__", press)
        yield


def test_a_dry_run_measures_and_costs_are_reported_by_length(teacher: Path, tmp_path: Path) -> None:
    found = linearise_dry_run(teacher, "local=window=2", distill=1.0, **SHORT_UPDATES)
    assert [stage.name for stage in found.stages] == ["transfer", "finetune"]
    assert all(stage.seconds > 0 and stage.peak_bytes > 0 for stage in found.stages)
    options = {**SHORT, "tune": "none", "controls": False, "lengths": None}
    report = subquad.linearise(teacher, "local=window=2", out=tmp_path / "out", **options).report
    assert [(row["variant"], row["length"], row["status"]) for row in report["lengths"]] == [
        ("attention", 16, "done"),
        ("mixers", 16, "done"),
    ]


def test_the_command_and_what_it_refuses(teacher: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["linearise", str(teacher), "--mixer", "local=window=2", "--transfer-updates", "1", "--tune-updates", "1"]
    assert run([*words, "--no-controls", "--out", str(tmp_path / "out")]) == 0
    assert "as a run" in capsys.readouterr().out
    assert run([*words, "--dry-run"]) == 0
    assert "memory: about" in capsys.readouterr().out
    assert run([*words, "--data", "digits", "--out", str(tmp_path / "other")]) == 1
    assert "learns from its own data" in capsys.readouterr().err
