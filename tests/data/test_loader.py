"""Batches built ahead by threads and processes: the same ones, in the same order, with the same errors."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.batches import batch_seed
from subquad.data.images.arrays import ArrayImages
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.sets import FolderImages, UnreadableImage
from subquad.data.images.transforms import AugmentOptions
from subquad.data.loader import BatchLoader
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


class Numbers:
    """Samples that are their numbers; 5 cannot be read, and 7 ends its process."""

    def __init__(self, training: bool = True) -> None:
        self.sizes: tuple[np.ndarray, ...] = (np.ones(100, np.int64),)
        self.training, self.built = training, 0
        self.skipped: dict[str, str] = {}

    def batch(self, numbers: np.ndarray, seed: int = 0) -> dict[str, torch.Tensor]:
        self.built += 1
        if 5 in numbers:
            raise UnreadableImage("five cannot be read")
        if 7 in numbers:
            os.kill(os.getpid(), signal.SIGKILL)
        if 3 in numbers:
            self.skipped["3"] = "three is odd"
            warnings.warn("left out: three is odd", stacklevel=1)
        return {"numbers": torch.from_numpy(numbers * (1 if self.training else -1)), "seed": torch.tensor(seed)}


def items(*numbers: int) -> list[tuple[np.ndarray, int]]:
    return [(np.array([number, 10 * number]), 100 + number) for number in numbers]


def loader(workers: int, processes: bool) -> Any:
    samples = {"train": Numbers(), "valid": Numbers(training=False)}
    return closing(BatchLoader(samples, workers, processes=processes))


WORKERS = [(0, False), (1, False), (3, False), (1, True), (2, True)]


@pytest.mark.parametrize(("workers", "processes"), WORKERS)
def test_batches_come_in_their_order_and_errors_in_their_turn(workers: int, processes: bool) -> None:
    """A validation takes place while training waits; an unreadable sample is known, and what is said of it."""
    with loader(workers, processes) as found, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training = found.load("train", items(0, 1, 2, 3, 4, 5, 6))
        first = [next(training) for _ in range(2)]
        valid = list(found.load("valid", items(*range(8, 30))))
        rest = [next(training) for _ in range(3)]
        with pytest.raises(UnreadableImage, match=r"^five cannot be read$"):
            next(training)
        assert list(training) == []
        skipped = dict(found.samples["train"].skipped)
    assert [batch["numbers"].tolist() for batch in first + rest] == [[n, 10 * n] for n in range(5)]
    assert [batch["numbers"].tolist() for batch in valid] == [[-n, -10 * n] for n in range(8, 30)]
    assert [int(batch["seed"]) for batch in first + rest] == [100, 101, 102, 103, 104]
    assert skipped == {"3": "three is odd"}
    assert [str(warning.message) for warning in said] == ["left out: three is odd"]


def test_closing_ends_the_threads_and_drops_the_rest() -> None:
    with loader(2, False) as found:
        built = found.load("train", items(*range(8, 1000)))
        next(built)
        built.close()
    assert found.samples["train"].built < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_a_killed_process_is_a_clear_error_and_takes_the_others_along() -> None:
    with loader(2, True) as found:
        assert len(list(found.load("train", items(8, 9)))) == 2
        pids = set(found.pool._processes)
        with pytest.raises(ChildProcessError, match=r"^a process that builds batches \(train\.data_workers\) died"):
            list(found.load("train", items(8, 9, 7, 10, 11)))
    assert pids
    assert_gone(pids)


def assert_gone(pids: set[int], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while left := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_random_numbers_of_the_process_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state(legacy=False)
    with loader(1, True) as found:
        assert len(list(found.load("train", items(8, 9)))) == 2
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])


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


def recipe(workers: int, updates: int = 9) -> Recipe:
    train = {"updates": updates, "validate_every": 3, "budget": {"max_sentences": 8}, "data_workers": workers}
    data = {"images": {"train": "unused", "valid": "unused"}}
    options = {"data": data, "model": MODEL, "schedule": SCHEDULE, "train": train}
    return Recipe.parse("recipe", {"task": "image-classification", **options})


def newest(run: Path) -> Checkpoint:
    return load_checkpoint(checkpoints(run / "checkpoints")[0])


def test_any_number_of_processes_and_an_interruption_give_the_same_bits(tmp_path: Path) -> None:
    """Augmentation, mixing and dropout on; interrupted in the middle of the second epoch."""
    pytest.importorskip("PIL", reason="augmentation needs the vision extra")
    for workers in (0, 1, 2):
        trainer(recipe(workers), tmp_path / str(workers), task()).fit()
    trainer(recipe(2, updates=6), tmp_path / "parts", task()).fit()
    trainer(recipe(1), tmp_path / "parts", task()).fit()
    first = newest(tmp_path / "0")
    for name in ("1", "2", "parts"):
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


def image_recipe(folder: Path) -> Path:
    """A recipe that trains without end on images in files, which two processes augment."""
    image = pytest.importorskip("PIL.Image", reason="image files need the vision extra")
    for number in range(24):
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((12, 12, 3), number, np.uint8)).save(path)
    images = str(folder / "images")
    given = {
        "task": "image-classification",
        "data": {"images": {"train": images, "valid": images}, "augment": {"size": 8}},
        "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": STACK},
        "schedule": SCHEDULE,
        "train": {"updates": 10**6, "validate_every": 2, "budget": {"max_sentences": 8}, "data_workers": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(given))
    return folder / "recipe.yaml"


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGINT, signal.SIGTERM))],
    ids=lambda number: number.name,
)
def test_a_command_that_ends_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in a terminal and the end of a job's time reach the workers too; only the command itself is killed."""
    run = tmp_path / "run"
    line = [sys.executable, "-m", "subquad.cli.main", "train", str(image_recipe(tmp_path)), "--out", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # a file, because a worker that stayed would keep a pipe open
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            line, env=environment, stderr=errors, preexec_fn=interruptible, start_new_session=True
        ) as process,
    ):
        while process.poll() is None and not checkpoints(run / "checkpoints"):
            time.sleep(0.1)
        members = session(process.pid)
        assert len(members) >= 4, f"the command, the server and two workers: {members}"
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        process.wait(60)
    assert_gone(members)
    written = (tmp_path / "errors").read_text()
    if number != signal.SIGKILL:
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], written
        update = newest(run).state.update
        kept = f"subquad: interrupted: update {update:,} is kept, and the same command goes on from it\n"
        assert written.endswith(kept)
        assert "Traceback" not in written


def session(leader: int) -> set[int]:
    """The processes of a session that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.add(int(path.parent.name))
    return found


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
