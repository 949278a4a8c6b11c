"""What a run writes: metrics in JSON lines always, trackers on request.

MetricsLog        one JSON object a line, appended and flushed: what a killed run has measured is there
build_trackers    TensorBoard and Weights & Biases, imported only when asked for
"""

import errno
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from subquad.config import Options
from subquad.packages import require
from subquad.train.artifacts import IDENTITY, import_wandb, run_artifact

RESUMED = "resumed"

# ---------------------------------------------------------------------- metrics in a file


class MetricsLog:
    """Appends records to a file. A line that a killed process left half written is cut off first."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self.file).st_size
        end = size
        while end > 0 and os.pread(self.file, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(self.file, end)
        self.is_new = end == 0

    def write(self, event: str, update: int, values: Mapping[str, Any] | None = None) -> None:
        """event: "train", "valid", ...; numbers that are not finite become strings, for JSON has none."""
        record = {"event": event, "update": update, "time": round(time.time(), 3), **(values or {})}
        line = json.dumps({key: _jsonable(value) for key, value in record.items()}) + "\n"
        end, data = os.fstat(self.file).st_size, line.encode()
        try:
            written = os.write(self.file, data)  # one call a line: it is there or it is not
            if written < len(data):  # the disk was full in the middle of it
                os.ftruncate(self.file, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, f"metrics cannot be written ({error.strerror})", str(self.path)) from None

    def resumed(self, update: int) -> None:
        """Says that the run went back to `update`: what was measured after it no longer counts."""
        self.write(RESUMED, update)

    def close(self) -> None:
        os.close(self.file)


def _jsonable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path, event: str | None = None) -> list[dict[str, Any]]:
    """The records that count, of one event or all. A half-written last line is left out."""
    records: list[dict[str, Any]] = []
    lines = Path(path).read_text().split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            event_of, update = record["event"], record["update"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a JSON record; the file is damaged") from None
        if event_of == RESUMED:
            records = [earlier for earlier in records if earlier["update"] <= update]
        records.append(record)
    return [record for record in records if event is None or record["event"] == event]


# ---------------------------------------------------------------------- trackers


class TrackConfig(Options):
    """Options of the trackers."""

    tensorboard: bool = Field(False, description="write TensorBoard events into the run directory")
    wandb: str | None = Field(None, description="the Weights & Biases project to report to")
    wandb_mode: Literal["online", "offline"] = Field("online", description="offline: write files only")
    wandb_artifacts: bool = Field(
        False, description="at the end, store the best checkpoint as a Weights & Biases artifact"
    )


class Tracker(Protocol):
    """Where metrics go besides the file."""

    def log(self, event: str, update: int, values: Mapping[str, float]) -> None: ...

    def artifact(self, run: Path, checkpoint: Path) -> None:
        """Stores one of the run's checkpoints with what is needed to use it, where that was asked for."""

    def close(self) -> None: ...


class TensorBoard:
    """Scalars as "event/metric"."""

    def __init__(self, run: Path) -> None:
        self.writer = _summary_writer()(str(run / "tensorboard"))

    def log(self, event: str, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{event}/{name}", value, update)
        self.writer.flush()

    def artifact(self, run: Path, checkpoint: Path) -> None:
        """TensorBoard stores no files."""

    def close(self) -> None:
        self.writer.close()


def _summary_writer() -> Any:
    purpose = "tracking with TensorBoard"
    return require("torch.utils.tensorboard", purpose, "track", package="tensorboard").SummaryWriter


class Wandb:
    """One Weights & Biases run for each run directory: a resumed run goes on in the same."""

    def __init__(self, run: Path, config: TrackConfig, recipe: Mapping[str, Any]) -> None:
        identity = run / IDENTITY
        known = identity.read_text().strip() if identity.exists() else None
        self.artifacts = config.wandb_artifacts
        self.run = import_wandb().init(
            project=config.wandb,
            name=run.name,
            id=known,
            resume="allow",
            dir=str(run),
            mode=config.wandb_mode,
            config=dict(recipe),
        )
        self.run.define_metric("update")
        self.run.define_metric("*", step_metric="update")  # its own steps count calls, and go on after a resume
        identity.write_text(f"{self.run.id}\n")

    def log(self, event: str, update: int, values: Mapping[str, float]) -> None:
        self.run.log({"update": update, **{f"{event}/{name}": value for name, value in values.items()}})

    def artifact(self, run: Path, checkpoint: Path) -> None:
        if self.artifacts:
            self.run.log_artifact(run_artifact(run, checkpoint))

    def close(self) -> None:
        self.run.finish()


class Guarded:
    """A tracker that stops no training: its first failure is a warning and its end, for the file has every number."""

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        with self._guard():
            self.tracker = build()

    def log(self, event: str, update: int, values: Mapping[str, float]) -> None:
        if self.tracker is not None:
            with self._guard():
                self.tracker.log(event, update, values)

    def artifact(self, run: Path, checkpoint: Path) -> None:
        if self.tracker is not None:
            with self._guard():
                self.tracker.artifact(run, checkpoint)

    def close(self) -> None:
        if self.tracker is not None:
            with self._guard():
                self.tracker.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # networks, disks, servers: whatever it is, training is worth more
            self.tracker = None
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(f"{self.name} failed and is left alone from now on: {reason}", RuntimeWarning, stacklevel=3)


def build_trackers(config: TrackConfig, run: Path, recipe: Mapping[str, Any]) -> list[Tracker]:
    """The trackers that a config asks for; a package that is missing is a ValueError, before anything is trained."""
    run.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    if config.tensorboard:
        _summary_writer()
        trackers.append(Guarded("TensorBoard", lambda: TensorBoard(run)))
    if config.wandb is not None:
        import_wandb()
        trackers.append(Guarded("Weights & Biases", lambda: Wandb(run, config, recipe)))
    return trackers
