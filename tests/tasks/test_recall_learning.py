"""What the recall tasks tell apart: softmax attention learns them, a convolution that sees five symbols cannot.

Two layers of a kernel of three see the symbol itself and four before it. What is asked is further away, but for a few
queries that come at once, so that the convolution is little better than a guess.
"""

from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad.data.stable_rng import StableRng

ROOT = Path(__file__).parents[2]
LIGHTCONV = {"name": "lightconv", "kernel_size": 3}
TINY: dict[str, Any] = {
    "task": "recall",
    "data": {
        "embedded": "associative_recall",
        "options": {"length": 32, "pairs": 4, "vocab": 16, "power_a": 0.1, "valid": 200},
    },
    "model": {
        "kind": "language-model",
        "vocab": 20,
        "dim": 32,
        "embedding": {"positions": "learned", "max_length": 32},
        "decoder": {"layers": 2, "heads": 2, "ffn_dim": 64, "norm": "pre", "mixer": "softmax"},
    },
    "optim": {"name": "adam", "betas": [0.9, 0.98]},
    "schedule": {"kind": "constant", "lr": 3e-3},
    "train": {"updates": 220, "validate_every": 220, "budget": {"max_tokens": None, "max_sentences": 64}},
}


def accuracy(recipe: Any, mixer: Any, out: Path, seed: int = 1) -> float:
    """What a model has reached on validation samples at the end of its training."""
    changes: Any = {"model": {"decoder": {"mixer": mixer}}, "train": {"seed": seed}}
    return subquad.train(recipe, out=out, quiet=True, **changes).metrics["accuracy"]


def test_softmax_recalls_and_a_short_convolution_cannot(tmp_path: Path) -> None:
    assert accuracy(TINY, "softmax", tmp_path / "softmax") > 0.95
    assert accuracy(TINY, LIGHTCONV, tmp_path / "lightconv") < 0.35


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "learned", "not_learned"),
    [("associative_recall", 0.95, 0.3), ("selective_copying", 0.9, 0.25), ("fuzzy_recall", 0.85, 0.5)],
)
def test_the_recipes_for_a_laptop_tell_them_apart(
    name: str, learned: float, not_learned: float, seed: int, tmp_path: Path
) -> None:
    recipe = f"small/{name}"
    assert accuracy(recipe, "softmax", tmp_path / "softmax", seed) > learned
    assert accuracy(recipe, LIGHTCONV, tmp_path / "lightconv", seed) < not_learned


@pytest.mark.nightly
def test_far_context_helps_softmax_and_not_a_short_convolution(tmp_path: Path) -> None:
    """Every line is 16 random letters twice: what is 16 letters back tells all of its second half."""
    for number, (split, count) in enumerate({"train": 4_000, "valid": 100, "test": 100}.items()):
        letters = StableRng(7, number).integers(8, 16 * count).reshape(count, 16)
        lines = ["".join("abcdefgh"[letter] for letter in line) * 2 for line in letters]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    splits = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid", "test")}
    data = {"splits": splits, "tokenizer": {"kind": "characters"}, "blocks": {"breaks": "eos"}}
    gains = {}
    for name, mixer in {"softmax": "softmax", "lightconv": LIGHTCONV}.items():
        recipe = {**TINY, "task": "language-model", "data": data}
        recipe["model"] = {**TINY["model"], "embedding": {"positions": "learned", "max_length": 64}}
        changes: Any = {"model": {"decoder": {"mixer": mixer}}, "train": {"updates": 500}}
        run = subquad.train(recipe, out=tmp_path / name, quiet=True, **changes)
        losses = {one.first: one.loss for one in subquad.evaluate(run, quiet=True).loss_by_position or []}
        gains[name] = losses[8] - losses[16]  # of the letters before the repetition, and of those in it
    assert gains["softmax"] > 1.0
    assert abs(gains["lightconv"]) < 0.2
