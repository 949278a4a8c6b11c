"""The floors of every task: what counting and linear models reach, by numbers that are computed here once more."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from subquad.tasks import Task, task_class
from subquad.tasks.base import Floor

LINES = {
    "train": ["a b c d", "a b d c", "", "b c a b c d", "d d a b"] * 20,
    "valid": ["a b c", "d"],
    "test": ["a b c d d", "", "c a e"],  # e was never seen
}


def opened(name: str, data: dict[str, Any], folder: Path) -> tuple[Task, Any]:
    task = task_class(name)
    config = task.Data.parse("data", data)
    return task.open(config, folder / "data"), config


def text_data(folder: Path, lines: dict[str, list[str]] = LINES) -> dict[str, Any]:
    for split, texts in lines.items():
        (folder / f"{split}.txt").write_text("".join(f"{text}\n" for text in texts))
    splits = {split: str(folder / f"{split}.txt") for split in lines}
    return {"splits": splits, "tokenizer": {"kind": "words"}, "blocks": {"tokens_per_sample": 8}}


def by_name(floors: list[Floor]) -> dict[str, Floor]:
    assert all(floor.how.endswith(".") for floor in floors)
    return {floor.name: floor for floor in floors}


def test_a_language_model_is_scored_on_every_token_that_evaluation_scores(tmp_path: Path) -> None:
    task, data = opened("language-model", text_data(tmp_path), tmp_path)
    floors = by_name(task.floors(data, "test"))
    assert {name: floor.kind for name, floor in floors.items()} == {"unigram": "trivial", "bigram": "linear"}
    # words and ends of lines, with absolute discounting: no count is 1, so it is one half
    tokens = [word for line in LINES["train"] for word in [*line.split(), "</s>"]]
    counts, vocab = Counter(tokens), task.data_dependent_model_config()["vocab"]
    scored = [word for line in LINES["test"] for word in [*line.split(), "</s>"]]
    probs = [(max(counts[word] - 0.5, 0) + 0.5 * len(counts) / vocab) / len(tokens) for word in scored]
    assert len(scored) == 11, "eight words and three ends of lines"
    assert floors["unigram"].value == pytest.approx(math.exp(-np.log(probs).mean()))
    valid = by_name(task.floors(data, "valid"))
    assert valid["bigram"].value < valid["unigram"].value, "all of its pairs were seen"
    assert f"{len(tokens):,} tokens" in floors["unigram"].how


def test_a_masked_language_model_is_scored_on_masked_tokens(tmp_path: Path) -> None:
    lines = {split: ["a b c d e f g h"] * 40 for split in ("train", "valid", "test")}
    task, data = opened("masked-language-model", text_data(tmp_path, lines), tmp_path)
    floors = by_name(task.floors(data, "test"))
    assert floors["unigram"].value == pytest.approx(9, rel=0.01), "eight words and an end of a line"
    neighbours = floors["neighbouring words"]
    assert neighbours.kind == "linear"
    assert neighbours.value < 2.5, "a neighbour tells the word, unless it is masked or random itself"


def test_translations_copy_or_repeat(tmp_path: Path) -> None:
    pairs = {
        "train": [("ein Hund", "a dog")] * 3 + [("eine Katze", "the cat sat on a mat .")] * 4,
        "valid": [("ein Hund", "a dog")],
        "test": [("the cat sat on the mat .", "the cat sat on a mat ."), ("Haus", "a house")],
    }
    splits: dict[str, list[str]] = {}
    for split, samples in pairs.items():
        splits[split] = []
        for side in (0, 1):
            path = tmp_path / f"{split}.{side}"
            path.write_text("".join(f"{sample[side]}\n" for sample in samples))
            splits[split].append(str(path))
    data = {"splits": splits, "tokenizer": {"kind": "words"}}
    task, config = opened("translation", data, tmp_path)
    floors = by_name(task.floors(config, "test"))
    references = [[pair[1] for pair in pairs["test"]]]
    copied = BLEU().corpus_score([pair[0] for pair in pairs["test"]], references).score
    repeated = BLEU().corpus_score(["the cat sat on a mat ."] * 2, references).score
    assert {name: floor.value for name, floor in floors.items()} == {
        "copying the source": pytest.approx(copied),
        "most frequent target": pytest.approx(repeated),
    }
    assert {floor.kind for floor in floors.values()} == {"trivial"}
    assert 10 < copied < repeated


def test_a_planted_rule_of_pixels_is_learned_by_the_linear_probe(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = {}
    for split, count in (("train", 120), ("valid", 40), ("test", 50)):
        labels = rng.choice(3, count, p=[0.2, 0.5, 0.3])
        pixels = rng.normal(0, 0.3, (count, 5, 5)).astype(np.float32)
        pixels[np.arange(count), 0, labels] += 5  # the class is the bright pixel of the first row
        images[split] = str(tmp_path / f"{split}.npz")
        np.savez(images[split], images=pixels, labels=labels)
        if split == "test":
            share = 100 * np.mean(labels == 1)
    task, data = opened("image-classification", {"images": images}, tmp_path)
    floors = by_name(task.floors(data, "test"))
    assert floors["linear probe"].value == 100
    assert floors["majority class"].value == pytest.approx(share)
    assert {name: floor.kind for name, floor in floors.items()} == {
        "majority class": "trivial",
        "linear probe": "linear",
    }
    assert "50 images of test" in floors["linear probe"].how


def test_the_embedded_digits_are_nearly_linear(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
    task, data = opened("image-classification", {"embedded": "digits"}, tmp_path)
    floors = by_name(task.floors(data, "test"))
    assert 93 < floors["linear probe"].value < 99
    assert 5 < floors["majority class"].value < 14
    assert task.floors(data, "test") == list(floors.values()), "it is the same every time"
