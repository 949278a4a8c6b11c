"""Trackers beside metrics.jsonl: TensorBoard and Weights & Biases, imported only when they are asked for.

A run can be stored as an artifact of Weights & Biases: a run directory with a single checkpoint and without the data,
that is recipe, environment, metrics and tokenizers. Once fetched, it is read as any other run.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml
from pydantic import Field

from subquad.config import Options
from subquad.packages import require
from subquad.train.checkpoint import read_state
from subquad.train.run_folder import ARTIFACT

IDENTITY = "wandb-id.txt"  # the run that a directory reports to; whoever fetches an artifact reports to another


def import_wandb() -> Any:
    return require("wandb", "tracking with Weights & Biases", "track")


def run_artifact(run: Path, checkpoint: Path) -> Any:
    """Returns a wandb.Artifact with the name of the run's folder, and the checkpoint's metrics as metadata."""
    state = read_state(checkpoint)
    metadata = {"update": state.update, "epoch": state.epoch, **state.metrics}
    artifact = import_wandb().Artifact(_allowed(run.resolve().name), type="model", metadata=metadata)
    shown = [path for path in run.iterdir() if not path.name.startswith(".") and path.name != IDENTITY]
    for file in sorted(path for path in shown if path.is_file()):
        artifact.add_file(str(file))
    for folder in (run / "tokenizers", checkpoint):
        if folder.is_dir():
            artifact.add_dir(str(folder), name=folder.relative_to(run).as_posix())
    return artifact


def _allowed(name: str) -> str:
    """Replaces what the name of an artifact may not have: it has letters, digits, _, - and dots."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)


def local_run(run: str | Path) -> Path:
    """Returns the folder of a run. An artifact `wandb:...` is fetched into runs/NAME-VERSION."""
    return fetch(str(run)) if str(run).startswith(ARTIFACT) else Path(run)


def fetch(reference: str, into: str | Path | None = None) -> Path:
    """Downloads `wandb:ENTITY/PROJECT/NAME:VERSION` into a folder, which is then a run directory."""
    name = reference.removeprefix(ARTIFACT)
    if not re.fullmatch(r"([^/:]+/){1,2}[^/:]+:[^/:]+", name):
        raise ValueError(f"{reference!r} names no artifact; write it as {ARTIFACT}ENTITY/PROJECT/NAME:VERSION")
    wandb = import_wandb()
    try:
        artifact = wandb.Api().artifact(name)
        # Its own name has the version's number, which a reference such as NAME:latest leaves open.
        folder = Path("runs") / artifact.name.replace(":", "-") if into is None else into
        return Path(artifact.download(root=str(folder)))
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise ValueError(f"the artifact {name} cannot be fetched: {' '.join(str(error).split())}") from None


# ---------------------------------------------------------------------- trackers


class TrackConfig(Options):
    """Options of the trackers."""

    tensorboard: bool = Field(False, description="Whether TensorBoard events are written into the run directory.")
    wandb: str | None = Field(None, description="The project of Weights & Biases to report to.")
    wandb_mode: Literal["online", "offline"] = Field("online", description="With offline, only files are written.")
    wandb_artifacts: bool = Field(
        False, description="Whether the best checkpoint is stored as an artifact of Weights & Biases at the end."
    )


class Tracker(Protocol):
    """Where metrics go besides the file."""

    def log(self, event: str, update: int, values: Mapping[str, float]) -> None: ...

    def artifact(self, run: Path, checkpoint: Path) -> None:
        """Stores one of the run's checkpoints with what is needed to use it, where that was asked for."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes events of TensorBoard into the run directory, with scalars called "event/metric".

    The recipe is there as text, and its values as hyperparameters beside the metrics of validation.
    """

    def __init__(self, run: Path, recipe: Mapping[str, Any]) -> None:
        self.writer = _summary_writer()(str(run / "tensorboard"))
        self.recipe: Mapping[str, Any] | None = recipe
        """What is to be written as hyperparameters, until the first validation tells the names of its metrics."""
        text = yaml.safe_dump(dict(recipe), sort_keys=False)
        self.writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()))  # Markdown's code

    def log(self, event: str, update: int, values: Mapping[str, float]) -> None:
        if event == "valid" and self.recipe is not None:
            self._write_hyperparameters(self.recipe, [f"{event}/{name}" for name in values])
            self.recipe = None
        for name, value in values.items():
            self.writer.add_scalar(f"{event}/{name}", value, update)
        self.writer.flush()

    def _write_hyperparameters(self, recipe: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """`add_hparams` of torch would write them into a folder of their own, as another run."""
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(dict(flatten(recipe)), dict.fromkeys(metrics, 0.0)):
            self.writer.file_writer.add_summary(summary)

    def artifact(self, run: Path, checkpoint: Path) -> None:
        """TensorBoard stores no files."""

    def close(self) -> None:
        self.writer.close()


def flatten(options: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yields the values of nested options by their places, such as ("train.updates", 100); lists are texts.

    >>> dict(flatten({"train": {"updates": 3, "minutes": None}, "optim": {"betas": [0.9, 0.98]}}))
    {'train.updates': 3, 'optim.betas': '[0.9, 0.98]'}
    """
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{place}{name}.")
        elif value is not None:
            yield f"{place}{name}", value if isinstance(value, bool | int | float | str) else str(value)


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


class SafeTracker:
    """Guards a tracker: after its first failure, which is a warning, it is not used again, and training goes on."""

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
    """Returns the trackers that a config asks for. A missing package is a ValueError, before anything is trained."""
    run.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    if config.tensorboard:
        _summary_writer()
        trackers.append(SafeTracker("TensorBoard", lambda: TensorBoard(run, recipe)))
    if config.wandb is not None:
        import_wandb()
        trackers.append(SafeTracker("Weights & Biases", lambda: Wandb(run, config, recipe)))
    return trackers
