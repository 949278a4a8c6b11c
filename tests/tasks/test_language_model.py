"""The loss of language models by position in the context, of the pass that gives the perplexity."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.run import Run

TOKENS = 9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("text")
    lines = [f"{'abcdefgh'[number % 8] * (1 + number % 5)} x{number % 3}" for number in range(40)]
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    stack = {"layers": 1, "heads": 2, "ffn_dim": 16, "norm": "pre", "mixer": "softmax"}
    recipe: dict[str, Any] = {
        "task": "language-model",
        "data": {
            "splits": {split: str(folder / f"{split}.txt") for split in ("train", "valid", "test")},
            "tokenizer": {"kind": "bytes"},
            "blocks": {"tokens_per_sample": TOKENS},
        },
        "model": {"kind": "language-model", "vocab": 260, "dim": 16, "decoder": stack},
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 3, "budget": {"max_tokens": 64}},
    }
    return subquad.train(recipe, out=folder / "run", quiet=True)


@pytest.mark.parametrize("context", [0, 4])
def test_losses_by_position_are_those_of_the_model(run: Run, context: int, tmp_path: Path) -> None:
    report = subquad.evaluate(run, context_window=context, out=tmp_path / "found.json", quiet=True, resamples=10)
    words, text = run.tokenizer(), (run.folder.parent / "test.txt").read_text().splitlines()
    stream = [number for line in text for number in [*words.encode(line), words.eos]]
    losses: dict[int, list[float]] = {}
    new = TOKENS - context
    for begin in range(0, len(stream), new):
        first, end = max(0, begin - context), min(len(stream), begin + new)
        inputs = [words.eos if place == 0 else stream[place - 1] for place in range(first, end)]
        with torch.no_grad():
            log_probs = run.model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
        for place in range(begin, end):
            bucket = (place - first).bit_length()
            losses.setdefault(bucket, []).append(-float(log_probs[place - first, stream[place]]))
    assert report.loss_by_position is not None
    found = {one.first.bit_length(): one for one in report.loss_by_position}
    assert {bucket: len(values) for bucket, values in losses.items()} == {key: one.tokens for key, one in found.items()}
    for bucket, values in losses.items():
        assert found[bucket].loss == pytest.approx(sum(values) / len(values), rel=1e-4)
    total = sum(one.loss * one.tokens for one in found.values()) / sum(one.tokens for one in found.values())
    assert report.metrics["ppl"].value == pytest.approx(math.exp(total))
    assert [one.last for one in report.loss_by_position][-1] == TOKENS - 1
