"""From a recipe's data to a task: embedded sets are written to the run's folder once and prepared like files."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subquad.config import nearest
from subquad.data import builtin
from subquad.data.images.sets import ImageSet, open_images
from subquad.data.text.prepare import ReportProgress, TextDataConfig, prepare_text
from subquad.data.text.sources import read_samples
from subquad.data.text.store import FIELDS, PreparedText, open_prepared, prepared_for
from subquad.files import wrap_corrupt_data_errors
from subquad.tasks.base import Task
from subquad.tasks.classification import ClassificationTask
from subquad.tasks.language import LanguageTask
from subquad.tasks.masked import MaskedTask
from subquad.tasks.translation import TranslationTask
from subquad.train.recipe import Recipe

EXPECTED = {
    "translation": "pairs",
    "language-model": "text",
    "masked-language-model": "text",
    "image-classification": "images",
}


def task_of(recipe: Recipe, cache: Path, report: ReportProgress | None = None) -> Task:
    """The task with its data. cache: where tokens are written that are not prepared yet."""
    weights = recipe.train.smoothing, recipe.train.aux_weight
    if recipe.task == "image-classification":
        config = recipe.data
        return ClassificationTask(_images(recipe), *weights, config.augment, config.mixing, config.repeated)
    data = prepared_text(recipe, cache, report)
    if data.task != prepared_for(recipe.task):
        raise ValueError(f"{data.folder} was prepared for {data.task}, the recipe is for {recipe.task}")
    for split in ("train", "valid"):
        if split not in data.splits:
            raise ValueError(f"{data.folder} has no split {split!r}{nearest(split, data.splits)}")
    if recipe.task == "translation":
        return TranslationTask(data, *weights)
    if recipe.task == "masked-language-model":
        return MaskedTask(data, recipe.data.blocks, recipe.data.masking, *weights)
    return LanguageTask(data, recipe.data.blocks, *weights)


def raw_samples(recipe: Recipe, split: str) -> list[tuple[str, ...]] | None:
    """Every sample of a text split as it was given, also those that preparing skips; None: only tokens are there."""
    config, fields = recipe.data, FIELDS[prepared_for(recipe.task)]
    if config.folder is not None or config.fairseq is not None:
        return None
    if config.embedded is not None:
        samples = _embedded(recipe).split(split)
        return [(sample,) if isinstance(sample, str) else tuple(sample) for sample in samples]
    _check_split(split, config.splits)
    source = config.splits[split]
    return None if source.is_ids else list(read_samples(source, fields))


def image_split(recipe: Recipe, split: str, classes: Sequence[str]) -> ImageSet:
    """One split of the images, whose classes are numbered as in training; the other splits need not be there."""
    config = recipe.data
    if config.embedded is not None:
        return _embedded(recipe).split(split)
    if split == "valid" and config.hold_out is not None:
        return _images(recipe)["valid"]
    _check_split(split, config.images)
    return ChosenImages([open_images(path, classes=classes) for path in config.images[split]])


def _check_split(split: str, known: Mapping[str, Any]) -> None:
    if split not in known:
        raise ValueError(
            f"the data has no split {split!r}{nearest(split, known)} It has {', '.join(known)}; --split chooses."
        )


def _embedded(recipe: Recipe) -> builtin.BuiltinSet:
    name = recipe.data.embedded
    assert name is not None
    found = builtin.load(name, **recipe.data.options)
    if found.kind != EXPECTED[recipe.task]:
        raise ValueError(
            f"the embedded set {name!r} holds {found.kind}; task {recipe.task} needs {EXPECTED[recipe.task]}"
        )
    return found


class ChosenImages:
    """Some images of one or several sets, which number the same classes."""

    def __init__(self, sets: Sequence[ImageSet], chosen: np.ndarray | None = None) -> None:
        """chosen: numbers of the images, counted through all sets; None: all of them."""
        self.sets, self.classes = sets, sets[0].classes
        self.ends = np.cumsum([len(images) for images in sets])
        self.chosen = np.arange(self.ends[-1]) if chosen is None else chosen

    @property
    def skipped(self) -> dict[str, str]:
        return {name: reason for images in self.sets for name, reason in images.skipped.items()}

    def __len__(self) -> int:
        return len(self.chosen)

    def _place(self, index: int) -> tuple[ImageSet, int]:
        number = int(self.chosen[index])
        place = int(np.searchsorted(self.ends, number, side="right"))
        return self.sets[place], number - (int(self.ends[place - 1]) if place else 0)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        images, number = self._place(index)
        return images[number]

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]:
        places = [self._place(int(index)) for index in indices]
        return [taken for images, number in places for taken in images.take([number])]


def _images(recipe: Recipe) -> dict[str, ImageSet]:
    if recipe.data.embedded is not None:
        found = _embedded(recipe)
        return {split: found.split(split) for split in builtin.SPLITS}
    files = recipe.data.images
    classes: list[str] | None = None
    splits: dict[str, list[ImageSet]] = {}
    for split in sorted(files, key=lambda name: name != "train"):  # the training images say which classes there are
        splits[split] = []
        for path in files[split]:
            splits[split].append(open_images(path, classes=classes))
            classes = splits[split][0].classes
    result: dict[str, ImageSet] = {split: ChosenImages(sets) for split, sets in splits.items()}
    if recipe.data.hold_out is not None:
        kept, held_out = _held_out(splits["train"], recipe.data.hold_out)
        result |= {"train": ChosenImages(splits["train"], kept), "valid": ChosenImages(splits["train"], held_out)}
    return result


def _held_out(sets: Sequence[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the images to train on, and of those to validate with."""
    labels = np.concatenate([images.labels for images in sets])
    if count >= len(labels):
        raise ValueError(f"data.hold_out is {count}; there are only {len(labels)} training images")
    by_class = bool((np.diff(labels) >= 0).all())  # class folders: the last images are all of one class
    chosen = np.arange(count) * len(labels) // count if by_class else np.arange(len(labels) - count, len(labels))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def prepared_text(recipe: Recipe, cache: Path, report: ReportProgress | None = None) -> PreparedText:
    """The recipe's text as tokens. cache: where they are written if they are not prepared yet."""
    config, task = recipe.data, prepared_for(recipe.task)
    if config.folder is not None:
        with wrap_corrupt_data_errors(f"the data in {config.folder}"):
            prepared = open_prepared(config.folder)
            prepared.verify()
        return prepared
    if config.fairseq is not None:
        return prepare_text(config.fairseq.text_config(task, config.max_length), cache, report=report)
    splits = dict(config.splits)
    if config.embedded is not None:
        found = _embedded(recipe)
        cache.mkdir(parents=True, exist_ok=True)
        files = {split: _written(cache, split, found.split(split), found.kind) for split in builtin.SPLITS}
        text = TextDataConfig.parse("data", {"task": task, "splits": {k: str(v) for k, v in files.items()}})
        splits = text.splits
    options = {
        "task": task,
        "splits": splits,
        "tokenizer": config.tokenizer,
        "target_tokenizer": config.target_tokenizer,
        "max_length": config.max_length,
    }
    return prepare_text(TextDataConfig.parse("data", options), cache, report=report)


def _written(cache: Path, split: str, samples: Sequence[tuple[str, str]] | Sequence[str], kind: str) -> Path:
    """A split of an embedded set as a file, which stays as it is when its content does."""
    path = cache / (f"{split}.csv" if kind == "pairs" else f"{split}.txt")
    content = io.StringIO(newline="")
    if kind == "pairs":
        csv.writer(content).writerows(samples)
    else:
        content.writelines(f"{line}\n" for line in samples)
    encoded = content.getvalue().encode()
    if not path.exists() or path.read_bytes() != encoded:
        path.write_bytes(encoded)
    return path
