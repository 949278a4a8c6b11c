"""`subquad evaluate`: a trained run on a split, with intervals, and against another run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.options import Checkpoint
from subquad.cli.output import is_rank_zero, print_table

if TYPE_CHECKING:
    from subquad.evaluate.report import EvaluationReport, MetricEstimate
    from subquad.evaluate.significance import Comparison


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

    Translation is measured by BLEU and chrF, language models by perplexity, recall by the accuracy of what is asked,
    classes of images and texts by top-1 and top-5 accuracy, all with confidence intervals. Every sample of the split
    counts once; if one has no result, the exit code is 1. Under torchrun the processes share the samples.

    Examples:
    subquad evaluate runs/phrases
    subquad evaluate runs/phrases decode.beam=4 --split valid --checkpoint last
    subquad evaluate runs/eva --against runs/phrases
    subquad evaluate runs/speeches --context-window 64
    torchrun --nproc-per-node=2 -m subquad evaluate runs/phrases
    """
    from subquad import api

    report = api.evaluate(
        run,
        *(changes or []),
        split=split,
        checkpoint=checkpoint,
        context_window=context_window,
        against=against,
        resamples=resamples,
        out=out,
    )
    if is_rank_zero():
        _show(report)
    if report.lost:
        raise ValueError(
            f"{report.lost:,} of {report.samples:,} samples of {split} were lost: they have no result; "
            f"{report.path} has the metrics of the others"
        )


def _show(report: "EvaluationReport") -> None:
    differences = {} if report.against is None else report.against.metrics
    headers = ["metric", "value", "95 % interval", *(["difference", "p"] if differences else []), "computed as"]
    rows = []
    for name, metric in report.metrics.items():
        row = [name, metric.format(metric.value), _between(metric, metric)]
        if name in differences:
            found = differences[name]
            row += [f"{metric.format(found.difference)} ({_between(metric, found)})", f"{found.p_value:.3f}"]
        elif differences:
            row += ["", ""]
        rows.append([*row, metric.signature])
    print_table(headers, rows, numeric=[1])
    counts = "".join(f", {name} {count:,}" for name, count in report.counts.items())
    print(f"\n{report.split}: {report.samples:,} samples, {report.lost:,} lost{counts}")
    print(f"checkpoint {report.checkpoint}, update {report.update:,}; written to {report.path}")


def _between(metric: "MetricEstimate", found: "MetricEstimate | Comparison") -> str:
    return f"{metric.format(found.low)} to {metric.format(found.high)}"
