"""Batches made ahead by threads: the same ones, in the same order, with the same errors."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.batches import batch_seed, prefetch
from subquad.data.images.arrays import ArrayImages
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.sets import FolderImages, UnreadableImage
from subquad.data.images.transforms import AugmentOptions
from subquad.tasks.image_classification import ImageClassificationTask
from subquad.train.checkpoint import Checkpoint, checkpoints, load_checkpoint
from subquad.train.metrics_log import read_metrics
from subquad.train.recipe import Recipe
from tests.signals import interruptible
from tests.train.test_trainer import SCHEDULE, STACK, assert_equal, trainer

pytestmark = pytest.mark.usefixtures("preloaded_programs")

MODEL = {
    "kind": "vision",
    "image_size": 8,
    "channels": 3,
    "num_classes": 4,
    "patch_size": 4,
    "dim": 16,
    "encoder": STACK,
}


@given(st.lists(st.integers()), st.integers(0, 4))
def test_items_come_in_their_order(items: list[int], threads: int) -> None:
    assert list(prefetch(lambda item: item * 2, items, threads)) == [item * 2 for item in items]


def test_an_error_comes_in_its_turn_as_itself() -> None:
    def make(item: int) -> int:
        if item == 5:
            raise ValueError("five")
        return item

    made = prefetch(make, range(9), 3)
    assert [next(made) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"^five$"):
        next(made)


def test_closing_ends_the_threads_and_drops_the_rest() -> None:
    started = []
    made = prefetch(lambda item: started.append(item), range(1000), 2)
    next(made)
    made.close()
    assert len(started) < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(0, 10**6))
def test_seeds_of_batches_depend_on_their_places(seed: int, epoch: int, number: int) -> None:
    own = batch_seed(seed, epoch, number)
    assert own == batch_seed(seed, epoch, number)
    others = {batch_seed(seed + 1, epoch, number), batch_seed(seed, epoch + 1, number)}
    assert own not in others | {batch_seed(seed, epoch, number + 1)}
    torch.Generator().manual_seed(own)  # it takes no larger ones


# ---------------------------------------------------------------------- training


def images(count: int) -> ArrayImages:
    pixels = np.random.default_rng(count).integers(0, 256, (count, 3, 8, 8), np.uint8)
    return ArrayImages(pixels, np.arange(count) % 4, list("abcd"), "noise")


def task(splits: dict[str, Any] | None = None) -> ImageClassificationTask:
    splits = splits or {"train": images(40), "valid": images(8)}
    return ImageClassificationTask(splits, augment=AugmentOptions(size=8), mixing=MixingOptions())


def recipe(threads: int, updates: int = 9) -> Recipe:
    train = {"updates": updates, "validate_every": 3, "budget": {"max_sentences": 8}, "data_workers": threads}
    data = {"images": {"train": "unused", "valid": "unused"}}
    options = {"data": data, "model": MODEL, "schedule": SCHEDULE, "train": train}
    return Recipe.parse("recipe", {"task": "image-classification", **options})


def newest(run: Path) -> Checkpoint:
    return load_checkpoint(checkpoints(run / "checkpoints")[0])


def test_any_number_of_threads_and_an_interruption_give_the_same_bits(tmp_path: Path) -> None:
    """Augmentation, mixing and dropout on; interrupted in the second epoch."""
    pytest.importorskip("PIL", reason="augmentation needs the vision extra")
    for threads in (0, 1, 3):
        trainer(recipe(threads), tmp_path / str(threads), task()).fit()
    trainer(recipe(2, updates=6), tmp_path / "parts", task()).fit()
    trainer(recipe(3), tmp_path / "parts", task()).fit()
    first = newest(tmp_path / "0")
    for name in ("1", "3", "parts"):
        other = newest(tmp_path / name)
        assert_equal(first.model, other.model)
        assert_equal(first.optimizer, other.optimizer)
        assert_equal(first.rng, other.rng)
        assert first.state.metrics == other.state.metrics


class RefusingImages(FolderImages):
    """Raises the error of an unreadable image instead of skipping it."""

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]:
        return [self[int(index)] for index in indices]


def test_a_truncated_image_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="image files need the vision extra")
    for number in range(24):
        folder = tmp_path / "images" / "abcd"[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    broken = tmp_path / "images" / "a" / "4.png"
    broken.write_bytes(broken.read_bytes()[:-30])
    splits = {"train": RefusingImages(tmp_path / "images"), "valid": images(8)}
    with pytest.raises(UnreadableImage, match=r"a/4\.png cannot be read"):
        trainer(recipe(2), tmp_path / "run", task(splits)).fit()


def test_an_interrupted_command_ends_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
    given = {
        "task": "image-classification",
        "data": {"embedded": "digits"},
        "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": STACK},
        "schedule": SCHEDULE,
        "train": {"updates": 10**6, "validate_every": 2, "budget": {"max_sentences": 50}, "data_workers": 2},
    }
    path, run = tmp_path / "recipe.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(given))
    line = [sys.executable, "-m", "subquad.cli.main", "train", str(path), "--out", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        line, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    ) as process:
        while process.poll() is None and not checkpoints(run / "checkpoints"):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    update = newest(run).state.update
    assert errors.endswith(f"subquad: interrupted: update {update:,} is kept, and the same command goes on from it\n")
    done = subprocess.run(
        [*line, f"train.updates={update + 2}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_metrics(run / "metrics.jsonl", "valid")[-1]["update"] == update + 2
