"""What a recipe would train, and whether its data can be read: `subquad train --dry-run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.models.costs import estimate_costs
from subquad.train.recipe import Recipe, read_recipe


@dataclass(frozen=True)
class DryRun:
    """What a recipe would train. batch and length: a typical batch; a sample without tokens has the length None.

    data: what is wrong with each input by its name; None: it was found, and its first sample can be read.
    counted: whether the model's classes or vocabulary are those of the data, and not the preset's or an aim.
    """

    task: str
    batch: int
    length: int | None
    parameters: int
    training_bytes: int
    model: dict[str, Any]
    data: dict[str, str | None]
    counted: bool

    @property
    def problems(self) -> dict[str, str]:
        return {name: problem for name, problem in self.data.items() if problem is not None}


def dry_run(recipe: "str | Path | Mapping[str, Any] | Recipe", *changes: str, **sections: Any) -> DryRun:
    """Checks a recipe and its data, and estimates the size and memory of its model without training anything.

    >>> import subquad
    >>> found = subquad.dry_run("digits")
    >>> found.parameters < 100_000, found.problems
    (True, {})
    """
    read = read_recipe(recipe, [*changes, sections])
    expected = read.task_class.expected_model_config(read.data)
    model = read.model_data(expected)
    batch, length = read.task_class.typical_batch(read.data, read.train.budget)
    cost = estimate_costs(model, batch, length or 1, streaming=False)
    data = {name: _find_problem(read, name, files) for name, files in read.data.input_files().items()}
    counted = "num_classes" in expected or bool(read.data.count_vocabularies())
    return DryRun(read.task, batch, length, cost.parameters, cost.training_bytes, model, data, counted)


def _find_problem(recipe: Recipe, name: str, files: Sequence[str]) -> str | None:
    """Why an input cannot be read, if it cannot."""
    if missing := [file for file in files if not Path(file).exists()]:
        return f"missing: {', '.join(missing)}"
    try:
        recipe.data.check_first_sample(name)
    except ValueError as error:
        return str(error)
    return None
