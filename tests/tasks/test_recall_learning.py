"""What the recall tasks tell apart: softmax attention learns them, a convolution that sees five symbols cannot.

Two layers of a kernel of three see the symbol itself and four before it. What is asked is further away, but for a few
queries that come at once, so that the convolution is little better than a guess.
"""

from pathlib import Path
from typing import Any

import pytest

import subquad

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
    changes = {"model": {"decoder": {"mixer": mixer}}, "train": {"seed": seed}}
    return subquad.train(recipe, out=out, quiet=True, **changes).metrics["accuracy"]


def test_softmax_recalls_and_a_short_convolution_cannot(tmp_path: Path) -> None:
    assert accuracy(TINY, "softmax", tmp_path / "softmax") > 0.95
    assert accuracy(TINY, LIGHTCONV, tmp_path / "lightconv") < 0.35
