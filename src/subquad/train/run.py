"""A run directory: recipe.yaml (resolved), environment.json, data/ (tokens), metrics.jsonl, checkpoints/.

Training on an existing run resumes it. Its recipe must be the same, but for how long it trains and what is tracked.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from subquad.environment import environment
from subquad.train.recipe import Recipe

RECIPE, ENVIRONMENT = "recipe.yaml", "environment.json"
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


def open_run(recipe: Recipe, run: Path) -> bool:
    """Writes the recipe of a new run, or compares it with that of an existing one; True if there was one."""
    data = recipe.model_dump(mode="json")
    path = run / RECIPE
    if not path.exists():
        run.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        (run / ENVIRONMENT).write_text(json.dumps(environment(torch.device("cpu")), indent=2) + "\n")
        return False
    before = yaml.safe_load(path.read_text())
    changed = [key for key in differences(before, data) if not key.startswith(FREE)]
    if changed:
        raise ValueError(
            f"{run} holds a run of another recipe ({', '.join(changed)} differ); give another --out, or the same recipe"
        )
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return True


def differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Dotted names of what differs between two configs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [found for key in keys for found in differences(before.get(key), now.get(key), f"{prefix}{key}.")]
    return [] if before == now else [prefix.rstrip(".")]
