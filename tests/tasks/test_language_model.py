"""The loss of language models by position in the context, of the pass that gives the perplexity."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.nn.embeddings import TokenEmbedding
from subquad.run import Run

TOKENS = 9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("text"), {"layers": 1, "mixer": "softmax"}, TOKENS)


def trained(folder: Path, stack: dict[str, Any], tokens: int, **embedding: Any) -> Run:
    lines = [f"{'abcdefgh'[number % 8] * (1 + number % 5)} x{number % 3}" for number in range(40)]
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    stack = {"heads": 2, "ffn_dim": 16, "norm": "pre", **stack}
    recipe: dict[str, Any] = {
        "task": "language-model",
        "data": {
            "splits": {split: str(folder / f"{split}.txt") for split in ("train", "valid", "test")},
            "tokenizer": {"kind": "bytes"},
            "blocks": {"tokens_per_sample": tokens},
        },
        "model": {"kind": "language-model", "vocab": 260, "dim": 16, "decoder": stack, "embedding": embedding},
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 3, "budget": {"max_tokens": 64}},
    }
    return subquad.train(recipe, out=folder / "run", quiet=True)


@pytest.mark.parametrize("context", [0, 4])
def test_losses_by_position_are_those_of_the_model(run: Run, context: int, tmp_path: Path) -> None:
    check_losses(run, TOKENS, context, tmp_path)


def check_losses(run: Run, tokens: int, context: int, folder: Path) -> None:
    """Losses and perplexity are those of whole pieces of text, each read by itself."""
    report = subquad.evaluate(run, context_window=context, out=folder / "found.json", quiet=True, resamples=10)
    words, text = run.tokenizer(), (run.folder.parent / "test.txt").read_text().splitlines()
    stream = [number for line in text for number in [*words.encode(line), words.eos]]
    losses: dict[int, list[float]] = {}
    new = tokens - context
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
    assert [one.last for one in report.loss_by_position][-1] == tokens - 1


# ---------------------------------------------------------------------- what a context window costs

TWO_CONVOLUTIONS = {"layers": 2, "mixer": {"name": "lightconv", "kernel_size": [3, 4]}}
WINDOWS = {"layers": 2, "mixer": {"name": "local", "window": 4}}


@pytest.mark.parametrize(
    ("stack", "embedding", "passes"),
    [
        pytest.param({"layers": 1, "mixer": "softmax"}, {}, 8, id="softmax"),  # all of the context
        pytest.param(TWO_CONVOLUTIONS, {}, (2 + 3 + 4) / 4, id="lightconv"),
        pytest.param(TWO_CONVOLUTIONS, {"positions": "learned"}, (2 + 3 + 4) / 4, id="learned positions"),
        pytest.param({"layers": 2, "mixer": {"name": "dynamicconv", "kernel_size": 3}}, {}, 2, id="dynamicconv"),
        pytest.param(WINDOWS, {}, 1, id="local"),  # windows begin where scored tokens do
        pytest.param(WINDOWS | {"mixer": {"name": "local", "window": 8}}, {}, 2, id="half of a window is scored"),
        pytest.param(WINDOWS | {"mixer": {"name": "local", "window": 4, "overlap": True}}, {}, 3, id="overlap"),
        pytest.param(WINDOWS | {"mixer": "lightconv,local", "layers": 2}, {}, 8, id="a long convolution"),
        pytest.param(
            {"layers": 2, "mixer": {"name": "local,lightconv", "window": 4, "kernel_size": 2}}, {}, 2, id="both"
        ),
        pytest.param({"layers": 2, "mixer": {"name": "lightconv,performer", "kernel_size": 2}}, {}, 8, id="performer"),
    ],
)
def test_a_context_is_read_as_far_as_it_matters(
    stack: dict[str, Any], embedding: dict[str, Any], passes: float, tmp_path: Path
) -> None:
    """The same numbers from fewer tokens, where layers look back a limited number of them. passes: over the text."""
    tokens, context = 32, 28
    run = trained(tmp_path, stack, tokens, **embedding)
    read: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, TokenEmbedding):
            read.append(inputs[0].numel())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        report = subquad.evaluate(run, context_window=context, out=tmp_path / "one.json", quiet=True, resamples=10)
    finally:
        hook.remove()
    assert sum(read) <= passes * report.counts["tokens"] + tokens
    check_losses(run, tokens, context, tmp_path)
