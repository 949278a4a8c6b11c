"""A run directory: recipe.yaml (resolved), environment.json, data/ (tokens), metrics.jsonl, checkpoints/.

Training on an existing run resumes it. Its recipe must be the same, but for what FREE names. A
run that came from another program has imported.json too, and gets its data when training goes on.
"""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from subquad.data.hub import HUB
from subquad.environment import environment
from subquad.files import read_yaml, write_json, write_text
from subquad.train.checkpoint import checkpoints
from subquad.train.origins import ENVIRONMENT, describe_origins
from subquad.train.recipe import Recipe

RECIPE = "recipe.yaml"
IMPORTED, METRICS = "imported.json", "metrics.jsonl"
LOCK = ".lock"
FREE = (
    *(
        "train.updates",
        "train.epochs",
        "train.minutes",
        "train.patience",
        "train.log_every",
        "checkpoints",
        "track",
        "decode",
    ),
    *("train.data_workers", "train.checkpoint_activations", "train.sharded"),
)
"""What may change when a run goes on: how long it trains, what is kept and shown, and what the result is free of."""
OF_TRAINING = ("data", "optim", "schedule", "train", "checkpoints", "track", "decode")
"""What else may change in a run that was imported, until it is trained here: all but the model and its task."""


def open_run(recipe: Recipe, run: Path) -> bool:
    """Writes the recipe of a new run, or compares it with that of one that has learned something; True if it has."""
    data = recipe.model_dump(mode="json")
    path = run / RECIPE
    trained = bool(checkpoints(run / "checkpoints")) or (run / IMPORTED).exists()
    if not path.exists() or not trained:  # what failed before it had learned anything decides nothing
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / ENVIRONMENT, environment(torch.device("cpu")) | describe_origins(recipe.model_data({})))
        write_text(path, yaml.safe_dump(data, sort_keys=False))
        return False
    before = read_yaml(path, "recipe")
    untouched = only_imported(run)
    if untouched:
        check_has_data(recipe, run, "train")
    free = OF_TRAINING if untouched else FREE
    changed = [key for key in differences(before, data) if not key.startswith(free)]
    if changed:
        raise ValueError(
            f"{run} holds a run of another recipe ({', '.join(changed)} differ); give another --out, or the same recipe"
        )
    if data != before:
        write_text(path, yaml.safe_dump(data, sort_keys=False))
    return True


def only_imported(run: Path) -> bool:
    """Whether a run came from another program and was not trained here: its recipe names data that nobody has."""
    return (run / IMPORTED).exists() and not (run / METRICS).exists()


def check_has_data(recipe: Recipe, run: Path, split: str) -> None:
    """Refuses an imported run that was given no data: the recipe it was imported with names files that stand for it."""
    data = recipe.data
    place = "images" if data.images else "splits"
    files = data.images.get(split, ()) if data.images else data.splits[split].files if split in data.splits else ()
    there = any(file.startswith(HUB) or Path(file).exists() for file in files)
    if there or not getattr(data, place) or not only_imported(run):
        return
    example = {"translation": "[SOURCE, TARGET]", "image-classification": "FOLDER"}.get(recipe.task, "FILE")
    missing = f"there is no {files[0]}; " if files else ""
    raise ValueError(
        f'{missing}{run} was imported and has no data of its own: give it some, as in "data.{place}.{split}={example}"'
    )


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keeps other trainers out of a run directory; the system opens the lock when this process ends, or dies."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ValueError(f"process {owner} trains in {run}; wait until it ends, or give another --out") from None
        except OSError as error:  # some shared file systems have no locks
            reason = error.strerror
            warnings.warn(f"{run} cannot be locked ({reason}): let no other process train in it", stacklevel=3)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Dotted names of what differs between two configs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [found for key in keys for found in differences(before.get(key), now.get(key), f"{prefix}{key}.")]
    return [] if before == now else [prefix.rstrip(".")]
