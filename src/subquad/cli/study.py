"""`subquad compare` of several recipes or lengths: one study, with one table of all of them."""

from pathlib import Path
from typing import TYPE_CHECKING

from subquad.cli.output import print_table

if TYPE_CHECKING:
    from subquad.compare.report.study import StudyResult


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
