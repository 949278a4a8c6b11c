"""Linearised models write with their streaming state: its size by position, and runs of ours that generate and export.

Attention keeps keys and values of all tokens. What lightconv and performer keep does not grow, nor what local attention
keeps once its window is full; EVA adds a few numbers for each chunk that leaves its window.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.interop.export.files import export_run
from subquad.linearise.measure import measure_decoding
from subquad.linearise.options import parse_mixer
from subquad.linearise.stages.layers import AttentionLayers
from subquad.nn.stack import MixerChoice
from tests.linearise.hosts import LLAMA, transformers

MIXERS = ("lightconv=kernel_size=3", "performer", "local=window=4", "eva=window=4")
POSITIONS = (64, 128)
DECODER = {"mixer": "softmax", "layers": 2, "heads": 2, "ffn_dim": 16}


def state_bytes(rows: list[dict[str, Any]], variant: str) -> list[int]:
    assert all(row["status"] == "done" for row in rows), rows
    return [row["state_bytes"] for row in rows if row["variant"] == variant]


def check_sizes(mixer: str, rows: list[dict[str, Any]]) -> None:
    before, after = state_bytes(rows, "attention"), state_bytes(rows, "mixers")
    assert before[1] > 1.9 * before[0]
    if mixer.startswith("eva"):
        assert after[1] - after[0] <= (before[1] - before[0]) / 2
    else:
        assert after[0] == after[1]


@pytest.mark.parametrize("mixer", MIXERS)
def test_states_of_transformers_models_stay_small(mixer: str) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | {"max_position_embeddings": 256}))
    layers = AttentionLayers(model, MixerChoice.model_validate(parse_mixer(mixer)))
    check_sizes(mixer, measure_decoding(model, layers, POSITIONS, lambda _: None))


def test_a_position_beyond_the_models_table_is_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    layers = AttentionLayers(model, MixerChoice.model_validate({"name": "performer"}))
    rows = measure_decoding(model, layers, [32], lambda _: None)
    assert [row["status"] for row in rows] == ["refused", "refused"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of ours that reads bytes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"line {number} of a text about nothing\n" for number in range(60)))
    recipe = {
        "task": "language-model",
        "data": {
            "splits": {split: [str(folder / "text.txt")] for split in ("train", "valid")},
            "tokenizer": {"kind": "bytes"},
            "blocks": {"tokens_per_sample": 32},
        },
        "model": {"kind": "language-model", "vocab": 260, "dim": 16, "decoder": DECODER},
        "schedule": {"lr": 1e-3, "warmup_updates": 1},
        "train": {"updates": 2, "budget": {"max_tokens": 128}},
    }
    subquad.train(recipe, out=folder / "teacher", quiet=True)
    return folder / "teacher"


@pytest.mark.parametrize("mixer", MIXERS)
def test_runs_are_linearised_write_and_export(mixer: str, teacher: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"transfer_updates": 2, "tune_updates": 2, "keep": 1, "controls": False, "quiet": True}
    found = subquad.linearise(teacher, mixer, out=tmp_path / "out", lengths=POSITIONS, valid_samples=8, **options)
    report = found.report
    assert sorted(report["layers"]) == sorted([mixer.partition("=")[0], "softmax"])
    assert {(row["length"], row["status"]) for row in report["lengths"]} == {(64, "done"), (128, "done")}
    before, after = state_bytes(report["decoding"], "attention"), state_bytes(report["decoding"], "mixers")
    kept = (before[1] - before[0]) / 2  # one of two layers keeps its attention
    assert kept <= after[1] - after[0] < 1.6 * kept
    run = subquad.load_run(tmp_path / "out/run")
    assert len(run.generate("line", tokens=9, top_k=1)) > len("line")
    model: Any = run.model
    tokens = torch.randint(4, 200, (1, 24), generator=torch.Generator().manual_seed(0))
    whole, state = model(tokens).logits, model.init_state(1)
    for place in range(tokens.shape[1]):
        step, state, _ = model(tokens[:, place : place + 1], state=state)
        assert torch.allclose(step[:, 0], whole[:, place], atol=1e-5)
    if mixer.startswith("lightconv"):  # exports of all mechanisms are tested where exports are
        assert export_run(run.loaded, "torch", tmp_path / "exported")
