"""The loss of language models by the position of a token in its block: which mechanisms make use of far context."""

import statistics

from subquad.compare.records import PositionLoss
from subquad.compare.report.formatting import NOTHING, format_number, format_seeds
from subquad.compare.report.result import Result
from subquad.compare.report.section import Axis, Content, Plot, PlotPoint, Section, Series, Table, View

DIGITS = 3
MEANING = (
    "The mean loss of test tokens, in nats, by how many tokens of their block stand before them, averaged over seeds; "
    "dots are single seeds. All tokens are scored in the same pass that gave the perplexity. While a curve falls, the "
    "mechanism makes use of context that far away; where it is flat, more context does nothing for it."
)
Bucket = tuple[int, int]
"""The first and the last position of a bucket."""


def content(result: Result) -> Content | None:
    losses = {label: _losses_by_bucket(result, label) for label in result.labels}
    losses = {label: found for label, found in losses.items() if found}
    if not losses:
        return None
    buckets = sorted({bucket for found in losses.values() for bucket in found})
    return Content(_table(losses, buckets), _plot(losses, buckets), MEANING)


def _losses_by_bucket(result: Result, label: str) -> dict[Bucket, list[PositionLoss]]:
    """What each seed of a mechanism recorded of every bucket of positions."""
    found: dict[Bucket, list[PositionLoss]] = {}
    for trial in result.trials_of(label):
        for loss in trial.loss_by_position:
            found.setdefault((loss.first, loss.last), []).append(loss)
    return dict(sorted(found.items()))


def _mean(losses: list[PositionLoss]) -> float:
    return statistics.fmean(one.loss for one in losses)


def _plot(losses: dict[str, dict[Bucket, list[PositionLoss]]], buckets: list[Bucket]) -> Plot:
    view = View(
        label="Loss by position in the context",
        x=Axis("tokens of context, up to →", log=True, ticks=[float(last + 1) for _, last in buckets]),
        y=Axis("loss, nats (lower is better)"),
        series=[
            Series(label, label, [_point(bucket, seeds) for bucket, seeds in found.items()])
            for label, found in losses.items()
        ],
    )
    return Plot([], {"": view})


def _point(bucket: Bucket, seeds: list[PositionLoss]) -> PlotPoint:
    # The token at position p has p + 1 tokens before it, so that no logarithm of 0 is needed.
    loss = _mean(seeds)
    lines = [
        f"loss {format_number(loss, DIGITS)} at positions {_shown(bucket)}",
        f"{format_number(seeds[0].tokens)} tokens, {format_seeds(len(seeds))}",
    ]
    dots = [one.loss for one in seeds] if len(seeds) > 1 else []
    return PlotPoint(bucket[1] + 1, loss, lines, dots=dots)


def _shown(bucket: Bucket) -> str:
    first, last = map(format_number, bucket)
    return first if first == last else f"{first} to {last}"


def _table(losses: dict[str, dict[Bucket, list[PositionLoss]]], buckets: list[Bucket]) -> Table:
    rows = []
    for bucket in buckets:
        cells = [
            format_number(_mean(found[bucket]), DIGITS) if bucket in found else NOTHING for found in losses.values()
        ]
        tokens = next(found[bucket][0].tokens for found in losses.values() if bucket in found)
        rows.append([_shown(bucket), *cells, format_number(tokens)])
    headers = ["position in the block", *losses, "tokens"]
    return Table(headers, rows, list(range(1, len(headers))), ["done"] * len(rows))


SECTION = Section("positions", "Who uses far context", "plots", content, table_title="Loss by position in the context")
