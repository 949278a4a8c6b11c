"""Checkpoints: folders from which training goes on as if it had never stopped.

    update-000001234/
      model.safetensors        the model's state by name
      optimizer.safetensors    the optimiser's by name of parameter (`train.optim.optimizer_state`)
      ema.safetensors          the moving average of the weights, where one is kept
      rng.safetensors          the states of all random generators
      state.json               update, epoch, cursor, scaler, metrics
      checksums.json           SHA-256 of each of them

A checkpoint is written under a temporary name, synced and renamed: under its own name it is whole. What a disk damages
later, the checksums show, by file.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from subquad.config import Options
from subquad.files import checksum, replace_synced, sync_folder

FORMAT = 1
CHECKPOINTS = "checkpoints"
PREFIX = "update-"
MODEL, OPTIMIZER, EMA, RNG = "model.safetensors", "optimizer.safetensors", "ema.safetensors", "rng.safetensors"
STATE, CHECKSUMS = "state.json", "checksums.json"


@dataclass
class TrainState:
    """The progress of a run. `cursor`, `scaler` and `extra` belong to the parts of the trainer that fill them."""

    update: int = 0
    epoch: int = 0
    epoch_end: bool = False
    """Whether the checkpoint stands at the end of an epoch."""
    cursor: dict[str, int] = field(default_factory=dict)
    scaler: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


STATES = TypeAdapter(TrainState)


@dataclass
class Checkpoint:
    """What a checkpoint holds."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: TrainState
    rng: dict[str, Tensor]
    ema: dict[str, Tensor] | None = None


# ---------------------------------------------------------------------- writing and reading


def save_checkpoint(folder: str | Path, checkpoint: Checkpoint) -> Path:
    """Writes `folder`/update-N and returns it. What a killed process left unfinished in `folder` is removed first."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _clean(folder)
    tensors = {MODEL: checkpoint.model, OPTIMIZER: checkpoint.optimizer, RNG: checkpoint.rng}
    if checkpoint.ema is not None:
        tensors[EMA] = checkpoint.ema
    return _save(folder / f"{PREFIX}{checkpoint.state.update:09d}", tensors, checkpoint.state)


def save_weights(final: Path, weights: Mapping[str, Tensor], state: TrainState) -> Path:
    """Writes a checkpoint of weights alone, which can be used but not trained further. No rule removes it."""
    if final.name.startswith((PREFIX, ".")):
        raise ValueError(f"{final.name!r} would be taken for a checkpoint of training; give another name")
    return _save(final, {MODEL: weights}, state)


def _save(final: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: TrainState) -> Path:
    folder = final.parent
    temporary, old = folder / f".new-{final.name}", folder / f".old-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write_all(temporary, tensors, state)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # what a full disk needs most is room
        raise ValueError(
            f"checkpoint {final} cannot be written: {error}; those before it are whole: once the disk takes it, "
            "the same command goes on from the newest"
        ) from None
    if final.exists():  # a folder cannot be replaced in one step; `_clean` puts the old one back after a crash here
        _remove(old)
        final.rename(old)
    temporary.rename(final)
    sync_folder(folder)
    _remove(old)
    return final


def _write_all(temporary: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: TrainState) -> None:
    temporary.mkdir()
    for name, content in tensors.items():
        _write(temporary / name, partial(save_file, separate(content)))
    described = {"format": FORMAT, **asdict(state)}
    _write(temporary / STATE, lambda path: path.write_text(json.dumps(described, indent=2) + "\n"))
    sums = {name: checksum(temporary / name) for name in (*tensors, STATE)}
    _write(temporary / CHECKSUMS, lambda path: path.write_text(json.dumps(sums, indent=2) + "\n"))


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns contiguous tensors on the CPU that share no memory, because safetensors takes no others."""
    seen: set[int] = set()
    result = {}
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        result[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return result


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    write(temporary)
    replace_synced(temporary, path)


def _clean(folder: Path) -> None:
    for path in [*folder.glob(f".new-{PREFIX}*"), *folder.glob(f".gone-{PREFIX}*")]:
        _remove(path)
    for path in folder.glob(f".old-{PREFIX}*"):
        final = folder / path.name.removeprefix(".old-")
        if final.exists():
            _remove(path)
        else:
            path.rename(final)


def _remove(path: Path) -> None:
    """Removes a folder. If a link stands in its place, only the link is removed."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a checkpoint; damage is a ValueError that names the damaged files."""
    path = Path(path)
    verify(path)
    return Checkpoint(
        model=_tensors(path / MODEL),
        optimizer=_tensors(path / OPTIMIZER),
        state=_parse_state(path),
        rng=_tensors(path / RNG),
        ema=_tensors(path / EMA) if (path / EMA).exists() else None,
    )


def load_weights_of(path: str | Path) -> dict[str, Tensor]:
    """Returns the weights that validation used: the moving average if the run keeps one."""
    path = Path(path)
    name = EMA if has_average(path) else MODEL
    verify(path, [name, STATE])
    return _tensors(path / name)


def has_average(path: Path) -> bool:
    """Whether a checkpoint was written with a moving average of the weights; the file itself may be lost."""
    return EMA in _json(path / CHECKSUMS) or (path / EMA).exists()


def has_weights_only(path: Path) -> bool:
    """Whether a checkpoint was written by `save_weights`."""
    return OPTIMIZER not in _json(path / CHECKSUMS)


def verify(path: Path, only: Sequence[str] | None = None) -> None:
    """Compares files with their checksums. only: the names of the files that are needed; None: all of them."""
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint {path}")
    sums = _json(path / CHECKSUMS)
    needed = {MODEL, OPTIMIZER, RNG, STATE} if only is None else set(only)
    if only is None:  # an average that was not written with it must not be read either
        needed |= {EMA} if (path / EMA).exists() else set()
    problems = [f"{name} has no checksum" for name in sorted(needed - sums.keys())]
    for name, expected in sums.items():
        if only is not None and name not in only:
            continue
        if not (path / name).is_file():
            problems.append(f"{name} is missing")
        elif checksum(path / name) != expected:
            problems.append(f"the checksum of {name} differs")
    if not problems and STATE in needed and _is_of_training(path):
        update = _parse_state(path).update
        problems = [] if update == _update_of(path) else [f"{STATE} is of update {update}"]
    if problems:
        raise ValueError(f"checkpoint {path} is damaged: {'; '.join(problems)}")


def read_state(path: Path) -> TrainState:
    """Reads the state of a checkpoint without its tensors. Damage is a ValueError that names the file."""
    verify(path, [STATE])
    return _parse_state(path)


def _parse_state(path: Path) -> TrainState:
    content = _json(path / STATE)
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{path / STATE} is not the state of a checkpoint in format {FORMAT}")
    unknown = content.keys() - TrainState.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"{path / STATE} holds the unknown entry {min(unknown)!r}")
    try:
        STATES.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        entry = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(f"{path / STATE} is damaged: {entry} is not what it has to be") from None
    return TrainState(**content)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path.parent} is damaged: {path.name} is missing") from None
    except (ValueError, RecursionError):
        raise ValueError(f"checkpoint {path.parent} is damaged: {path.name} cannot be read") from None
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint {path.parent} is damaged: {path.name} holds no table")
    return content


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


# ---------------------------------------------------------------------- which checkpoint


def checkpoint_folder(run: Path) -> Path:
    """Returns the folder in which a run directory has its checkpoints."""
    return run / CHECKPOINTS


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns all checkpoints of a run, the newest first."""
    return sorted(filter(_is_of_training, Path(folder).glob(f"{PREFIX}*")), key=_update_of, reverse=True)


def _is_of_training(path: Path) -> bool:
    return path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit()


def _update_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def latest(folder: str | Path) -> Path | None:
    """Returns the newest undamaged checkpoint, or None if there is no checkpoint. Damaged ones give a warning each."""
    damaged = []
    for path in checkpoints(folder):
        try:
            verify(path)
        except ValueError as error:
            damaged.append(path.name)
            warnings.warn(f"{error}; trying the one before it", stacklevel=2)
        else:
            return path
    if damaged:
        raise ValueError(f"every checkpoint in {folder} is damaged: {', '.join(damaged)}; restore one, or start anew")
    return None


class CheckpointRetention(Options):
    """Which checkpoints are kept: those that at least one rule keeps, and the newest one."""

    keep_last: int = Field(2, ge=1, description="How many of the newest are kept. With 2 a damaged one does no harm.")
    keep_epochs: int = Field(0, ge=0, description="How many of the newest that end an epoch are kept.")
    keep_best: int = Field(1, ge=0, description="How many of the best by the task's validation metric are kept.")
    keep_every: int = Field(0, ge=0, description="Those whose update is a multiple of this are kept; 0: no such rule.")
    every_minutes: float | None = Field(
        None,
        gt=0,
        description="One is also saved when the last is this many minutes old; null: at validations, and at the end.",
    )


class BestMetric(NamedTuple):
    """The validation metric by which checkpoints are compared. better: "lower" or "higher" values."""

    metric: str = "loss"
    better: str = "lower"

    def rank(self, metrics: Mapping[str, float]) -> float | None:
        """The metric with its sign such that lower is better; None if it is missing, or the model has diverged.

        A model that has diverged still has an accuracy, but some other number of it is not finite.
        """
        value = metrics.get(self.metric)
        if value is None or not all(map(math.isfinite, metrics.values())):
            return None
        return value if self.better == "lower" else -value


def best(folder: str | Path, metric: BestMetric, *, skip_damaged: bool = False) -> list[Path]:
    """Checkpoints that have the metric, the best first; of equals the older. skip_damaged: see `_states`."""
    scored = []
    for path, state in _states(folder, skip_damaged):
        if (rank := metric.rank(state.metrics)) is not None:
            scored.append((rank, _update_of(path), path))
    return [path for *_, path in sorted(scored)]


def _states(folder: str | Path, skip_damaged: bool) -> Iterator[tuple[Path, TrainState]]:
    """All checkpoints of a run with their states, the newest first.

    A damaged state is an error, for the checkpoint may be the one that is looked for. skip_damaged: a warning instead,
    which is for training alone: its next checkpoint does not depend on which of the old ones are kept.
    """
    for path in checkpoints(folder):
        try:
            state = read_state(path)
        except ValueError as error:
            if not skip_damaged:
                raise ValueError(
                    f"{error}, so it cannot be known whether it is the one to use; restore it, or say by name which to "
                    "use (--checkpoint NAME; subquad average RUN NAME ...)"
                ) from None
            warnings.warn(f"{error}; it is left out", stacklevel=3)
        else:
            yield path, state


def remove_surplus_checkpoints(folder: str | Path, retention: CheckpointRetention, metric: BestMetric) -> list[Path]:
    """Removes the checkpoints that no rule keeps, and returns their folders."""
    every = checkpoints(folder)
    kept = {*every[: retention.keep_last], *best(folder, metric, skip_damaged=True)[: retention.keep_best]}
    if retention.keep_epochs:
        ends = [path for path, state in _states(folder, skip_damaged=True) if state.epoch_end]
        kept.update(ends[: retention.keep_epochs])
    if retention.keep_every:
        kept.update(path for path in every if _update_of(path) % retention.keep_every == 0)
    removed = [path for path in every if path not in kept]
    for path in removed:
        gone = path.with_name(f".gone-{path.name}")  # renamed first: half a checkpoint must not keep its name
        path.rename(gone)
        _remove(gone)
    return removed


# ---------------------------------------------------------------------- averaging


def newest(folder: str | Path, count: int, *, up_to: int | None = None, epoch_ends: bool = False) -> list[Path]:
    """Returns the `count` newest checkpoints, newest first. up_to: an update, or with `epoch_ends` an epoch."""
    found = []
    for path, state in _states(folder, skip_damaged=False):
        if epoch_ends and not state.epoch_end:
            continue
        if up_to is None or (state.epoch if epoch_ends else state.update) <= up_to:
            found.append(path)
        if len(found) == count:  # what is older does not matter, not even if it is damaged
            return found
    what = "checkpoints at the end of an epoch" if epoch_ends else "checkpoints"
    raise ValueError(f"{folder} holds {len(found)} {what}, fewer than the {count} asked for; ask for fewer")


def average(paths: Sequence[str | Path], *, ema: bool = False) -> dict[str, Tensor]:
    """Returns the mean of the weights. Half precision is summed in float32, and integers are floor-divided."""
    if not paths:
        raise ValueError("averaging needs at least one checkpoint")
    name = EMA if ema else MODEL
    sums: dict[str, Tensor] = {}
    for path in map(Path, paths):
        verify(path, [name])
        weights = _tensors(path / name)
        if sums and weights.keys() != sums.keys():
            odd = sorted(weights.keys() ^ sums.keys())
            raise ValueError(f"{path} is of another model than {paths[0]}: {odd[0]!r} is not in both")
        for key, value in weights.items():
            value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            if key in sums and sums[key].shape != value.shape:
                raise ValueError(f"{path} is of another model than {paths[0]}: the shapes of {key!r} differ")
            sums[key] = sums[key] + value if key in sums else value
    count = len(paths)
    return {key: value / count if value.is_floating_point() else value // count for key, value in sums.items()}
