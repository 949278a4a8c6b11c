"""`subquad merge`: the results of one comparison on several machines as one."""

from pathlib import Path
from typing import Annotated

import typer


def merge(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="The result.json of each machine.")],
    out: Annotated[Path, typer.Option(help="The folder of the merged result.json and report.html.")],
) -> None:
    """Merge results of one comparison from several machines.

    Each machine trains other mechanisms or seeds of the same recipe and writes its result.json. The recipe, the task,
    the metric and the baseline must agree. Times are compared within one machine only. Machines that share a folder
    need no merging: `subquad compare --shard` divides the work among them.

    Examples:
    subquad merge first/result.json second/result.json --out runs/merged
    """
    from subquad.cli.compare import show_result
    from subquad.compare.report.merge import merge_files

    result = merge_files(results)
    out.mkdir(parents=True, exist_ok=True)
    result.to_json(out / "result.json")
    result.to_html(out / "report.html")
    show_result(result, out)
