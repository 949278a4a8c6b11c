"""Every command on a GPU, as users call it: on runs that were trained there."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subquad.cli.main import run as command
from subquad.packages import require_transformers
from tests.gpu import recipes

TASKS = {
    "translation": recipes.translation,
    "language-model": recipes.language_model,
    "text-classification": recipes.text_classification,
    "image-classification": recipes.image_classification,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task, trained by the command."""
    found = {}
    for task, recipe in TASKS.items():
        folder = tmp_path_factory.mktemp(task)
        call("train", recipes.write(folder, recipe(folder)), "--out", folder / "run")
        found[task] = folder / "run"
    return found


def call(*words: Any) -> None:
    assert command(["--debug", *map(str, words)]) == 0


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the command reads."""

    def given(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return given


@pytest.mark.parametrize("task", TASKS)
def test_evaluate(runs: dict[str, Path], task: str) -> None:
    call("evaluate", runs[task])
    found = json.loads((runs[task] / "evaluation-test.json").read_text())
    assert found["samples"] > 0
    assert found["lost"] == 0


@pytest.mark.parametrize(
    "options", [[], ["--alignments", "--nbest", "2", "--scores"], ["--int8"], ["--bfloat16"]], ids=str
)
def test_translate(runs: dict[str, Path], options: list[str], say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say("die Katze\n\nder Hund lief\n")
    call("translate", runs["translation"], *options)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (5 if "--nbest" in options else 3)  # an empty line has one translation


@pytest.mark.parametrize("options", [[], ["--greedy"], ["--beam", "2"], ["--top-k", "3", "--repetition-penalty", "2"]])
def test_generate(runs: dict[str, Path], options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    call("generate", runs["language-model"], "--prompt", "the", "--prompt", "the cat", "--tokens", "4", *options)
    out = capsys.readouterr().out
    assert out.startswith("the")
    assert "the cat" in out


def test_classify_images(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 255, (2, 8, 8), dtype=np.uint8))
    call("classify", runs["image-classification"], tmp_path / "images.npy")
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_classify_texts(runs: dict[str, Path], say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say("a good film\nbad\n")
    call("classify", runs["text-classification"])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_average(runs: dict[str, Path]) -> None:
    call("average", runs["translation"], "--updates", "2")
    call("evaluate", runs["translation"], "--checkpoint", "average", "--split", "valid")


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["torch", "onnx", "huggingface"])
@pytest.mark.parametrize("task", ["language-model", "image-classification"])
def test_export(runs: dict[str, Path], task: str, form: str, tmp_path: Path) -> None:
    call("export", runs[task], "--to", form, "--out", tmp_path / "exported")
    assert any((tmp_path / "exported").iterdir())


@pytest.mark.nightly
def test_recall(tmp_path: Path) -> None:
    call("train", recipes.write(tmp_path, recipes.recall()), "--out", tmp_path / "run")
    call("evaluate", tmp_path / "run")


LINEARISE = {
    "plain": ["--mixer", "local=window=4", "--no-controls"],
    "controls and costs": ["--mixer", "eva=window=4,landmarks=2", "--distill", "1", "--lengths", "8,16"],
    "a layer kept": ["--mixer", "performer=features=8", "--keep", "1", "--no-controls"],
    "LoRA": ["--mixer", "local=window=4", "--tune", "lora", "--distill", "1", "--no-controls"],
}
FEW_UPDATES = ["--transfer-updates", "1", "--tune-updates", "1"]


@pytest.mark.nightly
@pytest.mark.parametrize("options", LINEARISE.values(), ids=LINEARISE)
def test_linearise_a_run(tmp_path: Path, options: list[str]) -> None:
    """A run with softmax attention becomes one with another mechanism."""
    recipe = recipes.language_model(tmp_path, "softmax")
    recipe["model"]["decoder"] |= {"layers": 2}
    call("train", recipes.write(tmp_path, recipe), "--out", tmp_path / "teacher")
    call("linearise", tmp_path / "teacher", *options, *FEW_UPDATES, "--out", tmp_path / "out")
    call("evaluate", tmp_path / "out/run", "--checkpoint", "last")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [*LINEARISE.values(), ["--mixer", "eva", "--dry-run"]], ids=[*LINEARISE, "dry run"])
def test_linearise_a_model_of_transformers(tmp_path: Path, options: list[str]) -> None:
    pytest.importorskip("transformers")
    transformers = require_transformers("a small teacher")
    sizes = {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "teacher")
    (tmp_path / "lines.txt").write_text(recipes.LINES * 8)
    data = ["--data", tmp_path / "lines.txt", "--tokenizer", "bytes", "--length", "16", "--batch", "4"]
    call("linearise", tmp_path / "teacher", *data, *options, *FEW_UPDATES, "--out", tmp_path / "out")
    if "--dry-run" not in options:
        found = json.loads((tmp_path / "out/report.json").read_text())
        assert found["environment"]["device"] == torch.cuda.get_device_name()
        assert all(row["precision"] != "float32" for row in found["lengths"])  # else attention has no flash kernel
        assert len(found["lengths"]) == (4 if "--lengths" in options else 0)
        assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.nightly
def test_compare(tmp_path: Path) -> None:
    recipe = recipes.write(tmp_path, recipes.image_classification(tmp_path))
    small = ["--lengths", "16", "--tokens", "32", "--rounds", "1,2,3", "--seeds", "1", "--no-floors"]
    mixers = ["--mixers", "softmax,local", "--set", "local.window=4"]
    call("compare", recipe, *mixers, *small, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()


def test_bench(tmp_path: Path) -> None:
    sizes = ["--lengths", "16", "--dim", "16", "--heads", "2", "--repeats", "1"]
    call("bench", "--mixers", "eva,performer", "--device", "cuda", *sizes, "--out", tmp_path / "bench.json")
    assert (tmp_path / "bench.json").exists()


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing every package of the extras, which does not depend on the device."""
    monkeypatch.setattr("subquad.packages.find_broken", lambda *names: {})
    call("doctor", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert any(one["name"] == "self-test on cuda:0" for one in found["findings"])
