"""`subquad compare` of several recipes or lengths: one study, with one table of all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.cli.output import print_table

if TYPE_CHECKING:
    from subquad.compare.report.study import StudyResult
    from subquad.train.recipe import Recipe


def read_recipes(path: Path, changes: Sequence[str]) -> "dict[str, Recipe]":
    """The recipe of a file, or all recipes of a folder, by name."""
    from subquad.train.recipe import read_recipe

    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"the folder {path} holds no recipe, which is a file NAME.yaml")
    return {file.stem: read_recipe(file, changes) for file in files}


def show_study(study: "StudyResult", out: Path) -> None:
    """Prints the tables; failed trials are an error at the end."""
    from subquad.compare.report.study import PAGE, study_text

    results = study.results(out)
    for title, table in study_text(results):
        print(f"\n{title}")
        print_table(table.headers, table.rows, table.numeric)
    print(f"\n{out / PAGE}: the page; each comparison has its own in its folder")
    failed = [
        f"{part.title}, {trial.mechanism}, seed {trial.seed}: {trial.reason}"
        for part, result in results.items()
        for trial in result.trials
        if trial.status == "failed"
    ]
    if failed:
        raise ValueError(f"{len(failed)} trainings failed ({'; '.join(failed)})")
