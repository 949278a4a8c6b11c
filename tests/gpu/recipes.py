"""Tiny recipes of every task, which need no files besides those they write."""

from pathlib import Path
from typing import Any

import yaml

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16, "dropout": 0.0}
"""Without dropout, whose draws differ between devices."""
SCHEDULE = {"lr": 1e-2, "warmup_updates": 2}
LINES = "the cat sat on the mat\nthe dog ran to the cat\n"


def translation(folder: Path, **train: Any) -> dict[str, Any]:
    pairs = {"de": "die Katze saß\nder Hund lief weit\n" * 10, "en": "the cat sat\nthe dog ran far\n" * 10}
    for language, text in pairs.items():
        (folder / f"lines.{language}").write_text(text)
    split = [str(folder / "lines.de"), str(folder / "lines.en")]
    return {
        "task": "translation",
        "data": {"splits": dict.fromkeys(("train", "valid", "test"), split), "tokenizer": {"kind": "characters"}},
        "model": {
            "kind": "encoder-decoder",
            "source_vocab": 40,
            "target_vocab": 40,
            "dim": 16,
            "encoder": STACK | {"mixer": {"name": "local", "window": 4}},
            "decoder": STACK | {"mixer": {"name": "lightconv", "kernel_size": 3}},
        },
        "schedule": SCHEDULE,
        "train": {"updates": 4, "validate_every": 2, "budget": {"max_tokens": 200}, **train},
        "decode": {"max_len_b": 6, "beam": 2},
    }


def language_model(folder: Path, mixer: Any = "eva", task: str = "language-model", **train: Any) -> dict[str, Any]:
    path = folder / "lines.txt"
    path.write_text(LINES * 8)
    stack = "encoder" if task == "masked-language-model" else "decoder"
    return {
        "task": task,
        "data": {
            "splits": dict.fromkeys(("train", "valid", "test"), str(path)),
            "tokenizer": {"kind": "characters"},
            "blocks": {"tokens_per_sample": 16},
        },
        "model": {"kind": task, "vocab": 40, "dim": 16, stack: STACK | {"mixer": mixer}},
        "schedule": SCHEDULE,
        "train": {"updates": 4, "validate_every": 2, "budget": {"max_tokens": 128}, **train},
    }


def text_classification(folder: Path, **train: Any) -> dict[str, Any]:
    path = folder / "texts.tsv"
    path.write_text("pos\tgood film\nneg\tbad film\npos\ta good one\nneg\ta very bad one\n" * 4)
    return {
        "task": "text-classification",
        "data": {"splits": dict.fromkeys(("train", "valid", "test"), str(path)), "tokenizer": {"kind": "bytes"}},
        "model": {"preset": "text_small", "dim": 16, "encoder": STACK | {"mixer": "performer"}},
        "schedule": SCHEDULE,
        "train": {"updates": 2, "budget": {"max_sentences": 8}, **train},
    }


def image_classification(folder: Path, **train: Any) -> dict[str, Any]:
    mixer = {"name": "eva", "window": 2, "landmarks": 4, "relative": "table", "dims": 2}
    return {
        "task": "image-classification",
        "data": {"embedded": "digits"},
        "model": {"preset": "vision_small", "patch_size": 2, "dim": 16, "encoder": STACK | {"mixer": mixer}},
        "schedule": SCHEDULE,
        "train": {"updates": 2, "budget": {"max_sentences": 16}, **train},
    }


def recall(**train: Any) -> dict[str, Any]:
    options = {"length": 16, "pairs": 2, "vocab": 16, "power_a": 0.1}
    return {
        "task": "recall",
        "data": {"embedded": "associative_recall", "options": options},
        "model": {"kind": "language-model", "vocab": 20, "dim": 16, "decoder": STACK | {"mixer": "softmax"}},
        "schedule": SCHEDULE,
        "train": {"updates": 2, "budget": {"max_sentences": 8}, **train},
    }


def write(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
