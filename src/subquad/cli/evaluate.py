"""`subquad evaluate`: a trained run on a split, with intervals, and against another run."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.options import Checkpoint
from subquad.cli.output import print_table, progress

if TYPE_CHECKING:
    from subquad.train.distributed import Workers


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The run directory, or an artifact as in wandb:ENTITY/PROJECT/NAME:VERSION."
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Changes to decode and data of its recipe, such as decode.beam=4."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of the data to evaluate on.")] = "test",
    checkpoint: Checkpoint = "best",
    context_window: Annotated[
        int,
        typer.Option(min=0, help="A language model reads this many earlier tokens before those it predicts."),
    ] = 0,
    against: Annotated[
        Path | None,
        typer.Option(help="Test whether the run differs from this evaluated run on the same split."),
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=1, help="The bootstrap draws this many samples for intervals and tests.")
    ] = 1000,
    out: Annotated[
        Path | None, typer.Option(help="The JSON file to write. By default it is RUN/evaluation-SPLIT.json.")
    ] = None,
) -> None:
    """Measure the quality of a run on a split of its data.

    Translation is measured by BLEU and chrF, language models by perplexity, images by top-1 and top-5 accuracy, all
    with confidence intervals. Every sample of the split counts once; if one has no result, the exit code is 1. Under
    torchrun the processes share the samples.

    Examples:
    subquad evaluate runs/phrases
    subquad evaluate runs/phrases decode.beam=4 --split valid --checkpoint last
    subquad evaluate runs/eva --against runs/phrases
    subquad evaluate runs/speeches --context-window 64
    torchrun --nproc-per-node=2 -m subquad evaluate runs/phrases
    """
    from subquad.evaluate.report import stored_evaluation
    from subquad.train.artifacts import local_run
    from subquad.train.distributed import join, leave

    run = local_run(run)
    other = stored_evaluation(against, split) if against is not None else None
    path = out or run / f"evaluation-{split}.json"
    if path.suffix != ".json":
        raise ValueError(f"--out {path}: the name of a JSON file is needed, such as {path}.json")
    workers = join()
    try:
        content = _evaluate(run, changes or [], split, checkpoint, context_window, other, resamples, path, workers)
    finally:
        leave()
    if content["lost"]:
        raise ValueError(
            f"{content['lost']:,} of {content['samples']:,} samples of {split} were lost: they have no result; "
            f"{path} has the metrics of the others"
        )


def _evaluate(
    run: Path,
    changes: list[str],
    split: str,
    checkpoint: str,
    context_window: int,
    other: Path | None,
    resamples: int,
    path: Path,
    workers: "Workers",
) -> dict[str, Any]:
    from subquad.environment import environment
    from subquad.evaluate.report import FORMAT, WHAT, write_evaluation
    from subquad.files import read_metadata
    from subquad.tasks.evaluation import STEPS
    from subquad.train.run import evaluate_run, load_run

    loaded = load_run(run, checkpoint, changes)
    if other is not None and (task := read_metadata(other, FORMAT, WHAT, ["task"])["task"]) != loaded.recipe.task:
        raise ValueError(f"{run} is a run of task {loaded.recipe.task}, {other} of {task}: the two cannot be compared")
    start = time.monotonic()
    steps = STEPS * loaded.recipe.task_class.evaluation_passes
    with progress(steps) if workers.leads else nullcontext() as report:
        found = evaluate_run(loaded, split, context_window=context_window, workers=workers, report=report)
    content = {
        **found.summary(resamples),
        "run": str(run),
        "checkpoint": loaded.checkpoint.name,
        "update": loaded.update,
        "seconds": round(time.monotonic() - start, 3),
        "environment": environment(loaded.device),
    }
    if other is not None:
        content["against"] = found.against(other, resamples)
    if workers.leads:
        write_evaluation(path, found, content)
        _show(content, path)
    return content


def _show(content: Mapping[str, Any], path: Path) -> None:
    differences = content.get("against", {}).get("metrics", {})
    headers = ["metric", "value", "95 % interval", *(["difference", "p"] if differences else []), "computed as"]
    rows = []
    for name, metric in content["metrics"].items():
        row = [name, _shown(metric, metric["value"]), _between(metric, metric)]
        if name in differences:
            found = differences[name]
            row += [f"{_shown(metric, found['difference'])} ({_between(metric, found)})", f"{found['p_value']:.3f}"]
        elif differences:
            row += ["", ""]
        rows.append([*row, metric["signature"]])
    print_table(headers, rows, numeric=[1])
    counts = "".join(f", {name} {count:,}" for name, count in content["counts"].items())
    print(f"\n{content['split']}: {content['samples']:,} samples, {content['lost']:,} lost{counts}")
    print(f"checkpoint {content['checkpoint']}, update {content['update']:,}; written to {path}")


def _shown(metric: Mapping[str, Any], value: float) -> str:
    shown = f"{100 * value if metric['percent'] else value:.{metric['decimals']}f}"
    return f"{shown} %" if metric["percent"] else shown


def _between(metric: Mapping[str, Any], values: Mapping[str, float]) -> str:
    return f"{_shown(metric, values['low'])} to {_shown(metric, values['high'])}"
