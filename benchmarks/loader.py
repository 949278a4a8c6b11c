"""Speed of loading batches, without any training, by the number of workers; all of them in turns.

    python -m benchmarks.loader --json FILE            both parts, a few minutes on an idle machine
    python -m benchmarks.loader --only images --quick  one part, at toy sizes: shows that it works

Parts: images (generated JPEG files of 500 × 375 pixels with DeiT's augmentation, built by processes) and text (pairs of
random sentences in batches of 4,096 tokens, built by threads and by processes). A time is of a whole pass over some
batches, from the first that is asked for to the last; workers exist before. A time is printed only if the batches are,
to the bit, those that are built without workers; the exit code is 1 if they are not.
"""

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.measured import Effort, Result, measuring_parser, side_by_side
from benchmarks.runner import Part, run_parts
from subquad.data.batches import Batch, BatchPlan, Budget, batch_seed, collate_pairs
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.sets import open_images
from subquad.data.images.transforms import AugmentOptions
from subquad.data.loader import BatchLoader, BatchSource
from subquad.packages import require
from subquad.tasks.image_classification import ImageClassificationTask

TITLES = {
    "images": "images a second of 2 workers over those of 1",
    "text": "batches a second of the fastest over those without workers",
}
Items = list[tuple[Batch, int]]
Setting = tuple[int, bool]
"""The number of workers, and whether they are processes."""
MARKER = "make bench-loader"


def pass_checksum(loader: BatchLoader, items: Items) -> str:
    """SHA-256 of all batches, in order."""
    total = hashlib.sha256()
    for batch in loader.load("train", items):
        for name, value in batch.items():
            total.update(name.encode())
            total.update(value.contiguous().numpy().tobytes())
    return total.hexdigest()


def take_all(loader: BatchLoader, items: Items) -> None:
    for _ in loader.load("train", items):
        pass


def rates_by_setting(
    samples: BatchSource, items: Items, settings: Mapping[str, Setting], effort: Effort, count: int
) -> tuple[dict[str, float], str | None, dict[str, dict[str, float]]]:
    """What is loaded a second, of `count` in a pass, by setting; a reason instead if bits differ; and the seconds."""
    with ExitStack() as stack:
        loaders = {
            name: stack.enter_context(closing(BatchLoader({"train": samples}, workers, processes=processes)))
            for name, (workers, processes) in settings.items()
        }
        found = {name: pass_checksum(loader, items) for name, loader in loaders.items()}
        if wrong := [name for name in found if found[name] != next(iter(found.values()))]:
            return {}, f"other batches with {', '.join(wrong)}", {}
        work = {name: lambda loader=loader: take_all(loader, items) for name, loader in loaders.items()}
        seconds = side_by_side(work, effort)
    return {name: count / one["median"] for name, one in seconds.items()}, None, seconds


# ---------------------------------------------------------------------- images


def write_images(folder: Path, count: int) -> None:
    """Writes JPEG files of random soft shapes with grain, of about the size in bytes that photographs have."""
    pillow = require("PIL.Image", "reading images", "vision", package="Pillow")
    draws = np.random.default_rng(0)
    for number in range(count):
        shapes = pillow.fromarray(draws.integers(0, 256, (24, 32, 3), np.uint8)).resize((500, 375))
        grain = np.asarray(shapes) + draws.normal(0, 8, (375, 500, 3))
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(grain.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def images(effort: Effort) -> Iterator[Result]:
    """Decoding and DeiT's augmentation at 224 pixels."""
    size, batch, batches = (32, 4, 3) if effort.quick else (224, 64, 12)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), batch if effort.quick else 4 * batch)
        files = open_images(folder)
        task = ImageClassificationTask({"train": files}, augment=AugmentOptions(size=size), mixing=MixingOptions())
        plan = BatchPlan(np.ones(len(files)), budget=Budget(max_tokens=None, max_sentences=batch))
        epochs = -(-batches // len(plan.epoch(0)))
        places = [(numbers, epoch, place) for epoch in range(epochs) for place, numbers in enumerate(plan.epoch(epoch))]
        items = [(numbers, batch_seed(1, epoch, place)) for numbers, epoch, place in places[:batches]]
        settings = {f"{workers} workers": (workers, True) for workers in (0, 1, 2)}
        samples, count = task.samples("train", training=True), batch * len(items)
        rates, reason, seconds = rates_by_setting(samples, items, settings, effort, count)
    labels = {"pixels": size, "images a batch": batch}
    if reason is not None:
        yield Result("images", labels, reason=reason)
        return
    numbers = {f"{name}, images/s": rate for name, rate in rates.items()}
    yield Result("images", labels, numbers, rates["2 workers"] / rates["1 workers"], ("at least", 1.7), seconds=seconds)


# ---------------------------------------------------------------------- text


class RandomPairs:
    """Pairs of random sentences of 5 to 60 words, in memory."""

    def __init__(self, count: int) -> None:
        draws = np.random.default_rng(0)
        self.pairs = [[draws.integers(4, 30_000, draws.integers(5, 60)) for _ in range(2)] for _ in range(count)]
        self.sizes: tuple[np.ndarray, ...] = tuple(
            np.array([len(pair[side]) + 1 for pair in self.pairs]) for side in range(2)
        )

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, torch.Tensor]:  # noqa: ARG002
        return collate_pairs([(self.pairs[number][0], self.pairs[number][1]) for number in numbers], pad=1, eos=2)


def text(effort: Effort) -> Iterator[Result]:
    """Padding of sentences to batches, which is all that text costs once it is tokens."""
    samples = RandomPairs(200 if effort.quick else 30_000)
    items = [(numbers, 0) for numbers in BatchPlan(*samples.sizes, budget=Budget(max_tokens=4096)).epoch(0)]
    settings: dict[str, Setting] = {
        "no workers": (0, False),
        "1 thread": (1, False),
        "2 threads": (2, False),
        "1 process": (1, True),
        "2 processes": (2, True),
    }
    rates, reason, seconds = rates_by_setting(samples, items, settings, effort, len(items))
    labels = {"tokens a batch": 4096}
    if reason is not None:
        yield Result("text", labels, reason=reason)
        return
    numbers = {f"{name}, batches/s": rate for name, rate in rates.items()}
    yield Result("text", labels, numbers, max(rates.values()) / rates["no workers"], seconds=seconds)


# ---------------------------------------------------------------------- the run of a benchmark

PARTS: dict[str, Part] = {"images": images, "text": text}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return run_parts(options, {name: PARTS[name] for name in options.only or PARTS}, TITLES, MARKER)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", PARTS, repeats=5, budget=60.0)
    options = parser.parse_args(arguments)
    if options.threads < 1 or options.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
