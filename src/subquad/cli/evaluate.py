"""`subquad evaluate`: a trained run on a split, with intervals, and against another run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.options import Checkpoint, RemoveBpe, parse_integer, refuse_other_folders, split_words
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
    split: Annotated[str, typer.Option(help="The split of the data to evaluate on, or several: valid,test.")] = "test",
    checkpoint: Checkpoint = "best",
    context_window: Annotated[
        str,
        typer.Option(
            help="A language model reads this many earlier tokens before those it predicts; or several: 0,256,480."
        ),
    ] = "0",
    remove_bpe: RemoveBpe = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only this many samples of the split, from the first one on.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Test whether the run differs from this evaluated run on the same split."),
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=1, help="The bootstrap draws this many samples for intervals and tests.")
    ] = 1000,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The JSON file to write. By default it is RUN/evaluation-SPLIT.json; other windows and numbers of "
            "samples are kept beside it."
        ),
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
    subquad evaluate runs/speeches --context-window 0,64,128 --split valid,test
    subquad evaluate runs/phrases --first 100
    subquad evaluate runs/imported --remove-bpe subword_nmt
    torchrun --nproc-per-node=2 -m subquad evaluate runs/phrases
    """
    refuse_other_folders(run)
    from subquad import api

    given = [*(changes or []), *([] if remove_bpe is None else [f"decode.remove_bpe={remove_bpe}"])]
    windows = [_parse_window(word) for word in split_words(context_window)]
    splits = split_words(split)
    if not (windows and splits):
        raise ValueError("give at least one split, and one context window")
    if out is not None and len(splits) * len(windows) > 1:
        raise ValueError("--out is one file; several evaluations are kept in the run's folder")
    reports = []
    for name in splits:
        for window in windows:
            report = api.evaluate(
                run,
                *given,
                split=name,
                checkpoint=checkpoint,
                context_window=window,
                first=first,
                against=against,
                resamples=resamples,
                out=out,
            )
            reports.append(report)
            if is_rank_zero():
                print(end="\n" if len(reports) > 1 else "")
                _show(report)
    if is_rank_zero() and len(reports) > 1:
        _show_side_by_side(reports)
    for report in reports:
        if report.lost:
            raise ValueError(
                f"{report.lost:,} of {report.samples:,} samples of {report.split} were lost: they have no result; "
                f"{report.path} has the metrics of the others"
            )


def _parse_window(word: str) -> int:
    window = parse_integer("--context-window", word)
    if window < 0:
        raise ValueError(f"--context-window: {window} is below 0")
    return window


def _show_side_by_side(reports: "list[EvaluationReport]") -> None:
    """One row for each evaluation, with the values of its metrics."""
    names = list(dict.fromkeys(name for report in reports for name in report.metrics))
    rows = []
    for report in reports:
        values = [
            report.metrics[name].format(report.metrics[name].value) if name in report.metrics else "" for name in names
        ]
        rows.append([report.split, str(report.settings.get("context_window", "")), *values])
    print()
    print_table(["split", "context window", *names], rows, numeric=range(1, 2 + len(names)))


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
