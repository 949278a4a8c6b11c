"""Runs as artifacts of Weights & Biases: what one holds, and how it comes back.

An artifact is a run directory with a single checkpoint and without the data: recipe, environment, metrics, tokenizers.
Once fetched, it is read as any other run.
"""

import re
from pathlib import Path
from typing import Any

from subquad.packages import require
from subquad.train.checkpoint import read_state

REFERENCE = "wandb:"
IDENTITY = "wandb-id.txt"  # the run that a directory reports to; whoever fetches an artifact reports to another


def import_wandb() -> Any:
    return require("wandb", "tracking with Weights & Biases", "track")


def run_artifact(run: Path, checkpoint: Path) -> Any:
    """A wandb.Artifact called like the run's folder, with the numbers of the checkpoint's validation beside it."""
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
    """An artifact's name has letters, digits, _, - and dots."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)


def local_run(run: str | Path) -> Path:
    """The folder of a run: as given, or that of an artifact `wandb:...`, which is fetched into runs/NAME-VERSION."""
    return fetch(str(run)) if str(run).startswith(REFERENCE) else Path(run)


def fetch(reference: str, into: str | Path | None = None) -> Path:
    """Downloads `wandb:ENTITY/PROJECT/NAME:VERSION` into a folder, which is then a run directory."""
    name = reference.removeprefix(REFERENCE)
    if not re.fullmatch(r"([^/:]+/){1,2}[^/:]+:[^/:]+", name):
        raise ValueError(f"{reference!r} names no artifact; write it as {REFERENCE}ENTITY/PROJECT/NAME:VERSION")
    wandb = import_wandb()
    try:
        artifact = wandb.Api().artifact(name)
        # Its own name has the version's number, which a reference such as NAME:latest leaves open.
        folder = Path("runs") / artifact.name.replace(":", "-") if into is None else into
        return Path(artifact.download(root=str(folder)))
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise ValueError(f"the artifact {name} cannot be fetched: {' '.join(str(error).split())}") from None
