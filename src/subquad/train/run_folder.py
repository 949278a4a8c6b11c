"""The folders that commands are given, as far as they can be told without torch, which takes seconds to import."""

from pathlib import Path

RECIPE = "recipe.yaml"
ARTIFACT = "wandb:"
"""The beginning of what is no folder, but the name of a run that a tracker keeps."""
SWAPPED = '"model_type": "subquad_swapped"'
"""What the config of a swapped model of transformers says."""


def check_run(folder: Path) -> None:
    """Raises a ValueError that gives the reason if a folder is no run directory."""
    if not (folder / RECIPE).is_file():
        why = f"it holds no {RECIPE}" if folder.is_dir() else "it is a file" if folder.exists() else "there is none"
        raise ValueError(f"{folder} is no run: {why}; `subquad train RECIPE --out FOLDER` makes one")


def check_run_or_artifact(name: str) -> None:
    """As `check_run`; what a tracker keeps is looked for later."""
    if not name.startswith(ARTIFACT):
        check_run(Path(name))


def is_swapped_model(folder: Path) -> bool:
    """Whether a folder holds a swapped model of transformers, such as a linearised one."""
    config = folder / "config.json"
    return config.is_file() and SWAPPED in config.read_text(encoding="utf-8", errors="replace")
