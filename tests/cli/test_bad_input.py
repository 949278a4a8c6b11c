"""Bad input by the command line: one clear line and a non-zero exit, or a skip that is counted and said."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from subquad.cli.main import run as command
from subquad.train.metrics_log import read_metrics

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16}
LINES = ["the cat sat on the mat", "a dog", "two dogs bark", "three cats sleep all day long"] * 3


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, list[str]]:
    """Good files; tests spoil them."""
    return {
        split: [write(tmp_path / f"{split}.{side}", LINES) for side in ("en", "de")] for split in ("train", "valid")
    }


class Outcome:
    """What `subquad train` said and did."""

    def __init__(self, folder: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        path, self.run = folder / "recipe.yaml", folder / "run"
        path.write_text(yaml.safe_dump({"schedule": {"kind": "constant", "lr": 1e-3}, **recipe}))
        capsys.readouterr()
        self.code = command(["train", str(path), "--out", str(self.run)])
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err

    @property
    def error(self) -> str:
        """The one line of a refusal; before it there may be one about the run."""
        assert self.code == 1, self.err
        assert self.out == ""
        *before, line = self.err.strip().split("\n")
        assert len(before) <= 1
        assert line.startswith("subquad: error: ")
        assert "defect" not in line
        return line


def translation(splits: dict[str, Any], budget: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    return {
        "task": "translation",
        "data": {"splits": splits, "tokenizer": {"kind": "words"}, **data},
        "model": {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": STACK},
        "train": {"updates": 1, "budget": budget or {"max_tokens": 64}},
    }


# ---------------------------------------------------------------------- text


def test_good_text_is_used_in_full(tmp_path: Path, texts, capsys) -> None:
    outcome = Outcome(tmp_path, translation(texts), capsys)
    assert outcome.code == 0
    assert "12 samples" in outcome.err
    assert "skipped" not in outcome.err


def spoil_unequal(path: Path) -> str:
    write(path, LINES[:-1])
    return "parallel files need the same number of lines: train.en has 12 lines, train.de has 11 lines"


def spoil_encoding(path: Path) -> str:
    path.write_bytes(b"fine\n" * 3 + b"Stra\xdfe\n" + b"fine\n" * 8)
    return "train.de, line 4: not UTF-8, byte 5 is 0xdf"


def spoil_empty(path: Path) -> str:
    path.write_bytes(b"")
    path.with_suffix(".en").write_bytes(b"")
    return "train.en, train.de: empty, there are no samples"


def spoil_blank(path: Path) -> str:
    write(path, [""] * len(LINES))
    return "no sample is left of 12: 12 empty, 0 over-long"


def spoil_gzip(path: Path) -> str:
    path.write_bytes(gzip.compress(b"a line\n" * 12)[:-9])
    return "train.de is damaged"


def spoil_missing(path: Path) -> str:
    path.unlink()
    return "train.de: there is no such file"


def spoil_folder(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "train.de is a folder, but a file is needed"


SPOILERS = [spoil_unequal, spoil_encoding, spoil_empty, spoil_blank, spoil_gzip, spoil_missing, spoil_folder]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_bad_text_is_refused(tmp_path: Path, texts, capsys, spoil) -> None:
    message = spoil(tmp_path / "train.de")
    assert message in Outcome(tmp_path, translation(texts), capsys).error.replace(f"{tmp_path}/", "")


def test_empty_and_over_long_samples_are_counted(tmp_path: Path, texts, capsys) -> None:
    write(tmp_path / "train.de", ["", *LINES[1:]])
    outcome = Outcome(tmp_path, translation(texts, max_length=5), capsys)
    assert outcome.code == 0
    assert "train: samples skipped: 1 empty, 5 over-long\n" in outcome.err
    assert "valid: samples skipped: 6 over-long\n" in outcome.err
    stored = json.loads((outcome.run / "data" / "data.json").read_text())["splits"]["train"]
    assert (stored["read"], stored["samples"]) == (12, 6)


def test_samples_beyond_the_budget(tmp_path: Path, texts, capsys) -> None:
    write(tmp_path / "train.en", [*LINES[:-1], "cat " * 70])
    assert "sample 11 has 71 tokens, more than max_tokens=64" in Outcome(tmp_path, translation(texts), capsys).error
    budget = {"max_tokens": 64, "skip_long": True}
    (tmp_path / "again").mkdir()
    outcome = Outcome(tmp_path / "again", translation(texts, budget), capsys)
    assert outcome.code == 0
    assert "train: 1 samples are longer than train.budget.max_tokens and left out" in outcome.err


# ---------------------------------------------------------------------- images

Image: Any = pytest.importorskip("PIL.Image")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("valid", 3)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def classification(folder: Path) -> dict[str, Any]:
    splits = {"train": str(folder / "train"), "valid": str(folder / "valid")}
    return {
        "task": "image-classification",
        "data": {"images": splits, "augment": {"size": 8, "randaugment": None}},
        "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": STACK},
        "train": {"epochs": 1, "budget": {"max_sentences": 4}},
    }


def test_unreadable_images_are_counted(images: Path, capsys) -> None:
    whole = (images / "train" / "cat" / "0.png").read_bytes()
    (images / "train" / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (images / "valid" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="left out: .*png cannot be read") as said:
        outcome = Outcome(images, classification(images), capsys)
    assert outcome.code == 0
    names = {name for name in ("cat/0.png", "dog/1.png") if any(name in str(warning.message) for warning in said)}
    assert names == {"cat/0.png", "dog/1.png"}
    assert read_metrics(outcome.run / "metrics.jsonl", "valid")[-1]["unreadable"] == 2
    assert "unreadable 2" in outcome.out


def spoil_class(images: Path) -> str:
    (images / "train" / "owl").mkdir()
    return "train has no image of 1 of the 3 classes: owl"


def spoil_valid(images: Path) -> str:
    for path in (images / "valid" / "dog").iterdir():
        path.unlink()
    (images / "valid" / "dog").rmdir()
    return "valid has no folder for 1 of the classes: dog"


def spoil_unknown(images: Path) -> str:
    (images / "valid" / "owl").mkdir()
    return "valid has folders that are none of the classes: owl"


def spoil_images(images: Path) -> str:
    (images / "train").rename(images / "gone")
    return "train does not exist: give a folder of class folders"


@pytest.mark.parametrize("spoil", [spoil_class, spoil_valid, spoil_unknown, spoil_images])
def test_bad_images_are_refused(images: Path, capsys, spoil) -> None:
    message = spoil(images)
    assert message in Outcome(images, classification(images), capsys).error


def test_damaged_arrays_are_refused(tmp_path: Path, capsys) -> None:
    np.savez(tmp_path / "train.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.array([0, 1, 0, 1]))
    content = (tmp_path / "train.npz").read_bytes()
    (tmp_path / "train.npz").write_bytes(content[: len(content) // 2])
    recipe = classification(tmp_path)
    recipe["data"]["images"] = {"train": str(tmp_path / "train.npz")}
    recipe["data"]["hold_out"] = 1
    assert "train.npz cannot be read" in Outcome(tmp_path, recipe, capsys).error
