"""What tests of commands share: the recipes that come out, and how two of them are compared."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from subquad.interop.commands import Conversion
from subquad.mixers import Mixer
from subquad.models import build_from_config
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.schedules import Schedule

GOLDEN = Path(__file__).parents[2] / "golden"


def recipe_of(conversion: Conversion) -> Recipe:
    """The recipe as a user would read it: written as YAML, and read again."""
    return Recipe.parse("converted", yaml.safe_load(conversion.to_text()))


def shipped(name: str) -> Recipe:
    return read_recipe(name)


def meta_model(recipe: Recipe) -> Any:
    with torch.device("meta"):
        return build_from_config(recipe.model_data({}))


def layers(recipe: Recipe) -> tuple[Any, list[Any]]:
    """The config of the model, and that of every mixer, with all defaults filled in."""
    model = meta_model(recipe)
    mixers = [(name, part.name, part.config) for name, part in model.named_modules() if isinstance(part, Mixer)]
    return without_mixers(model.config.model_dump()), mixers


def without_mixers(content: Any) -> Any:
    if isinstance(content, list | tuple):
        return [without_mixers(part) for part in content]
    if not isinstance(content, dict):
        return content
    return {name: without_mixers(part) for name, part in content.items() if name not in ("mixer", "cross")}


def rates(recipe: Recipe) -> list[float]:
    """The learning rates of 20 updates at the start, and of some along the whole curve."""
    schedule = Schedule(recipe.schedule, recipe.train.updates, recipe.train.epochs)
    last = recipe.train.updates or 1000
    updates = [*range(20), *(last * step // 50 for step in range(50))]
    return [schedule.learning_rate(update, update // 100) for update in updates]


def assert_same_training(found: Recipe, expected: Recipe) -> None:
    """Model, optimiser, learning rates, batches and loss are the same; data and logs may differ."""
    assert found.task == expected.task
    assert layers(found) == layers(expected)
    assert found.optim == expected.optim
    assert rates(found) == pytest.approx(rates(expected), rel=1e-12)
    assert found.schedule.stop_lr == expected.schedule.stop_lr
    apart = {"log_every", "validate_every", "data_workers", "precision"}
    assert found.train.model_dump(exclude=apart) == expected.train.model_dump(exclude=apart)
    assert (found.train.precision == "float32") == (expected.train.precision == "float32")


def write_config(path: Path, proj_k: int | None) -> None:
    """A config as crybot/linformer's are."""
    model: dict[str, Any] = {"type": "Vanilla transformer" if proj_k is None else "Linformer"}
    model |= {"dim": 512, "mlp_dim": 2048, "n_heads": 8, "n_layers": 6} | ({} if proj_k is None else {"k": proj_k})
    schedule = {"warmup_steps": 4000, "cosine_annealing": True, "cosine_tmax": 10, "min_lr": 1e-6}
    training = {"epochs": 10, "batch_size": 88, "learning_rate": 1e-4, "lr_scheduler": schedule}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"model": model, "training": training, "dataset": {"max_length": 256}}))
