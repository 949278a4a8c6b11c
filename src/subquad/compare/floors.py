"""Floors of a comparison: what simple models reach on its data, computed once and kept in OUT/floors.json.

The task says which there are (`Task.floors`). They belong to no mechanism, and need neither trials nor the machine.
"""

from pathlib import Path
from typing import Any

from subquad.compare.plan import Plan
from subquad.files import digest, read_metadata, write_json
from subquad.tasks.base import Floor
from subquad.train.recipe import Recipe
from subquad.train.run import build_task

FILE, FORMAT = "floors.json", "subquad-floors-1"


def compute_floors(out: Path, plan: Plan) -> None:
    """Computes the floors and stores them. Data that is gone is no error: the file then says why there are none."""
    recipe = Recipe.parse("recipe", plan.recipe)
    floors: list[Floor] = []
    reason = None
    try:
        floors = build_task(recipe, out / "data").floors(recipe.data, plan.split)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
    content = {"key": _key(plan), "floors": [floor.model_dump() for floor in floors], "reason": reason}
    write_json(out / FILE, {"format": FORMAT, **content})


def floors_are_open(out: Path, plan: Plan) -> bool:
    """Whether the plan asks for floors that are not computed yet."""
    return plan.floors and not ((out / FILE).exists() and _read(out)["key"] == _key(plan))


def stored_floors(out: Path) -> tuple[list[Floor], str | None]:
    """The floors that are computed, and why there are none if that failed."""
    if not (out / FILE).exists():
        return [], None
    content = _read(out)
    return [Floor.model_validate(floor) for floor in content["floors"]], content["reason"]


def _key(plan: Plan) -> str:
    return digest([plan.recipe["task"], plan.recipe["data"], plan.split])


def _read(out: Path) -> dict[str, Any]:
    return read_metadata(out / FILE, FORMAT, "floors of a comparison", ["key", "floors", "reason"])
