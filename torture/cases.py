"""Small trainings on the embedded sets, and the comparison of two runs to the bit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from subquad.train.checkpoint import checkpoints, load_checkpoint
from subquad.train.metrics_log import read_metrics
from torture.processes import Child, Ended, Failpoint, done

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16, "dropout": 0.2, "norm": "pre"}
SMALL: dict[str, dict[str, Any]] = {
    "phrases": {
        "task": "translation",
        "data": {
            "embedded": "phrases",
            "options": {"train": 120, "valid": 20, "test": 20},
            "tokenizer": {"kind": "bpe", "vocab_size": 300},
        },
        "model": {
            "preset": "translation_small",
            "dim": 16,
            "shared_embedding": True,
            "encoder": {**STACK, "mixer": "lightconv"},
            "decoder": {**STACK, "mixer": "primal"},
        },
        "train": {"budget": {"max_tokens": 400}, "accumulate": 2, "smoothing": 0.1},
    },
    "digits": {
        "task": "image-classification",
        "data": {"embedded": "digits"},
        "model": {
            "preset": "vision_small",
            "patch_size": 2,
            "dim": 16,
            "encoder": {**STACK, "mixer": {"name": "eva", "window": 2, "landmarks": 4, "dims": 2}},
        },
        "train": {"budget": {"max_sentences": 100}, "smoothing": 0.1},
    },
    "speeches": {
        "task": "language-model",
        "data": {
            "embedded": "speeches",
            "tokenizer": {"kind": "bytes"},
            "blocks": {"tokens_per_sample": 256, "breaks": "none"},
        },
        "model": {"preset": "lm_small", "dim": 16, "decoder": {**STACK, "mixer": {"name": "local", "window": 16}}},
        "train": {"budget": {"max_tokens": 2048}},
    },
}
COMMON: dict[str, Any] = {
    "optim": {"name": "adam", "ema": 0.9},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 4},
    "checkpoints": {"keep_last": 3},
}
LENGTH = {"updates": 12, "validate_every": 3, "log_every": 2}
"""Four checkpoints, of which the first is removed by rotation."""


class Case:
    """A recipe in a folder, and the run that was never disturbed."""

    def __init__(self, folder: Path, name: str, **train: Any) -> None:
        self.folder, self.name = folder, name
        given = {**COMMON, **SMALL[name], "train": {**SMALL[name]["train"], **LENGTH, **train}}
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe, self.reference = folder / f"{name}.yaml", folder / f"{name}-reference"
        self.recipe.write_text(yaml.safe_dump(given))

    def words(self, run: Path, *changes: str) -> list[str]:
        return ["train", str(self.recipe), *changes, "--out", str(run)]

    def train_reference(self, *changes: str) -> None:
        ended = done(self.words(self.reference, *changes))
        if ended.code:
            raise RuntimeError(f"the undisturbed run failed: {ended.said}")

    def start(self, run: Path, failpoint: Failpoint | None = None) -> Child:
        return Child(self.words(run), None if failpoint is None else failpoint.install)

    def finish(self, run: Path) -> str | None:
        """Goes on with a run to its end; what is wrong with it then, or None."""
        ended = done(self.words(run))
        return f"code {ended.code}: {ended.last}" if ended.code else difference(run, self.reference)

    def operations(self) -> int:
        """How many operations on the files of checkpoints an undisturbed run makes."""
        counted = self.folder / f"{self.name}-count.txt"
        run = self.folder / f"{self.name}-counted"
        self.start(run, Failpoint("count", counted=counted)).wait()
        return int(counted.read_text())


PARTS = ("model", "optimizer", "ema", "rng")


def difference(run: Path, reference: Path, parts: Sequence[str] = PARTS) -> str | None:
    """What differs between the newest checkpoints and the logs of two runs; None: nothing, to the bit."""
    ours, other = (load_checkpoint(checkpoints(one / "checkpoints")[0]) for one in (run, reference))
    for part in parts:
        pair = [{k: v for k, v in (getattr(one, part) or {}).items() if not _is_unused(k)} for one in (ours, other)]
        if (name := unequal(*pair)) is not None:
            return f"{part}: {name} differs"
    for entry in ("update", "epoch", "epoch_end", "cursor", "scaler", "metrics"):
        if getattr(ours.state, entry) != getattr(other.state, entry):
            return f"{entry} differs"
    return None if losses(run) == losses(reference) else "the log of validations differs"


def _is_unused(name: str) -> bool:
    """States of numpy's and Python's generators: training draws from neither, and each process seeds its own."""
    return "numpy." in name or "python." in name


def unequal(ours: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """The first name whose tensors differ in a bit, a type or a shape, or which only one has."""
    for name in sorted({*ours, *other}):
        if name not in ours or name not in other or ours[name].dtype != other[name].dtype:
            return name
        if not torch.equal(ours[name], other[name]):
            return name
    return None


def losses(run: Path) -> list[tuple[int, Any]]:
    return [(record["update"], record["loss"]) for record in read_metrics(run / "metrics.jsonl", "valid")]


def last_line(ended: Ended) -> str:
    return f"code {ended.code}, {ended.last!r}"
