"""The comparison as one HTML file that opens offline.

Text and tables are written here, so that they are there without JavaScript; the scripts in assets/ draw the plots from
the same data, which the page carries. Nothing is loaded: the page's own policy forbids every request, and allows only
the style and the scripts whose checksums it states. What a recipe or a label says can therefore not become code.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from subquad.compare.report.conclusions import conclusions, shown_part
from subquad.compare.report.formatting import format_bytes, format_metric, format_number, format_ratio, format_seeds
from subquad.compare.report.schema import LengthPoint, Result, Timing, Trial
from subquad.compare.report.statistics import differences, quality, same_data_order
from subquad.compare.report.table import NOTHING, Table, cost_axes, table
from subquad.files import replace_synced

SCRIPTS = ("scales.js", "plot.js", "page.js")
GROUPS = {"quality": "Quality", "cost": "Cost", "caveat": "Limits"}


def write_page(result: Result, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(page(result), encoding="utf-8")
    replace_synced(temporary, path)


def page(result: Result) -> str:
    """The whole file."""
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    policy = f"default-src 'none'; style-src {_allowed(style)}; script-src {_allowed(script)}; base-uri 'none'"
    return Template(_asset("page.html")).substitute(
        policy=policy,
        style=style,
        script=script,
        data=embedded(page_data(result)),
        title=html.escape(result.title),
        about=html.escape(_about(result)),
        conclusions=_conclusions(result),
        table=_table("All mechanisms", table(result)),
        table_note=html.escape(_table_note(result)),
        epochs=_epochs(result),
        details=_details(result),
        footer=html.escape(f"Made by subquad{f', {result.created}' if result.created else ''}. {result.command}"),
    )


def page_data(result: Result) -> dict[str, Any]:
    """What the scripts draw: the result itself, and what follows from it."""
    found = differences(result)
    estimates = {label: quality(result, label) for label in result.labels}
    return {
        "result": result.model_dump(mode="json"),
        "quality": {label: asdict(item) for label, item in estimates.items() if item is not None},
        "differences": {label: asdict(item) for label, item in found.items()},
        "axes": [asdict(axis) for axis in cost_axes(result)],
        "part": shown_part(result),
    }


def embedded(data: Any) -> str:
    """JSON inside an HTML script element: no character of it can end the element or start a comment."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("subquad.compare.report").joinpath("assets", name).read_text(encoding="utf-8")


def _allowed(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


# ---------------------------------------------------------------------- text


def _about(result: Result) -> str:
    runs = {trial.seed for trial in result.trials}
    better = f"{result.metric.name} ({result.metric.better} is better)"
    words = [result.task, better, f"{len(result.mechanisms)} mechanisms", f"baseline {result.baseline}"]
    return "\N{NO-BREAK SPACE}· ".join([*words, format_seeds(len(runs))] if runs else words)


def _conclusions(result: Result) -> str:
    first, *rest = conclusions(result)
    parts = [f'<p class="headline">{html.escape(first.text)}</p>']
    if first.detail:
        parts.append(f'<p class="detail">{_prose(first.detail)}</p>')
    parts.append('<div class="findings">')
    for kind, title in GROUPS.items():
        texts = [finding.text for finding in rest if finding.kind == kind]
        if texts:
            items = "".join(f"<li>{_prose(text)}</li>" for text in texts)
            parts.append(f'<h3>{title}</h3><ul class="{kind}">{items}</ul>')
    return "\n".join([*parts, "</div>"])


def _prose(text: str) -> str:
    """Escaped, and "p = 0.04" is never broken over two lines."""
    return html.escape(text.replace("p = ", "p\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"))


def _table_note(result: Result) -> str:
    counts = [estimate.seeds for label in result.labels if (estimate := quality(result, label))]
    texts = []
    if counts and max(counts) > 1:
        texts.append("Means over seeds; intervals by Student's t.")
    if counts and min(counts) == 1:
        texts.append("With one seed the interval is the bootstrap interval of its run.")
    if same_data_order(result):
        texts.append("All runs of a seed saw the same batches in the same order.")
    part = "whole model" if shown_part(result) == "full" else "encoder"
    texts.append(
        f"Faster from: the sequence length from which on training is faster than with {result.baseline}, interpolated "
        f"between the measured lengths ({part}); always: at all of them."
    )
    return " ".join(texts)


# ---------------------------------------------------------------------- tables


def _table(caption: str, shown: Table) -> str:
    """The first cell of a row is its heading."""

    def cell(column: int, text: str, scope: str | None) -> str:
        kind, number_class = "th" if scope else "td", ' class="number"' if column in shown.numeric else ""
        return f"<{kind}{f' scope={scope}' if scope else ''}{number_class}>{html.escape(text)}</{kind}>"

    head = "".join(cell(i, text, "col") for i, text in enumerate(shown.headers))
    rows = []
    for row, mark in zip(shown.rows, shown.marks, strict=True):
        cells = [cell(i, text, None if i else "row") for i, text in enumerate(row)]
        rows.append(f'<tr data-label="{html.escape(row[0])}" data-state="{mark}">{"".join(cells)}</tr>')
    hidden = f'<caption class="visually-hidden">{html.escape(caption)}</caption>'
    return f"<table>{hidden}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _details(result: Result) -> str:
    parts = []
    if result.trials:
        parts.append(_folded("Every run", _table("Every run", _runs(result))))
    if result.lengths:
        parts.append(_folded("Every length", _table("Every length", _lengths(result.lengths))))
    if result.approximation:
        headers = ["mechanism", "option", "activations", "length", "relative error", "relative time", "setting"]
        rows = [
            [
                p.mechanism,
                p.option,
                p.source,
                format_number(p.length),
                f"{p.error:.3g}",
                f"{p.cost:.3g}",
                _setting(p.setting),
            ]
            for p in result.approximation
        ]
        parts.append(_folded("Every distance from exact attention", _plain(headers, rows, [3, 4, 5])))
    if result.environment:
        pairs = "".join(
            f"<dt>{html.escape(str(key))}</dt><dd>{html.escape(str(value))}</dd>"
            for key, value in result.environment.items()
        )
        parts.append(_folded("Environment", f"<dl>{pairs}</dl>"))
    if result.recipe:
        shown = html.escape(yaml.safe_dump(result.recipe, sort_keys=False, allow_unicode=True))
        parts.append(_folded("Recipe", f'<pre tabindex="0">{shown}</pre>'))
    return "\n".join(parts)


def _folded(title: str, content: str) -> str:
    inner = content if content.startswith(("<dl", "<pre")) else f'<div class="scroll" tabindex="0">{content}</div>'
    return f"<details><summary>{title}</summary>{inner}</details>"


def _plain(headers: list[str], rows: list[list[str]], numeric: list[int]) -> str:
    return _table(headers[0], Table(headers, rows, numeric, ["done"] * len(rows)))


def _runs(result: Result) -> Table:
    headers = ["mechanism", "seed", result.metric.name, "training s", "peak memory", "folder", "setting", "state"]
    rows = [_run(result, trial) for trial in result.trials]
    return Table(headers, rows, [1, 2, 3, 4], [trial.status for trial in result.trials])


def _run(result: Result, trial: Trial) -> list[str]:
    score = trial.scores.get(result.metric.name)
    return [
        trial.mechanism,
        str(trial.seed),
        NOTHING if score is None else format_metric(result.metric, score.value),
        NOTHING if trial.training_seconds is None else format_number(trial.training_seconds),
        NOTHING if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
        trial.run or NOTHING,
        _setting(trial.setting),
        f"{trial.status}: {trial.reason}" if trial.reason else trial.status,
    ]


def _lengths(points: Sequence[LengthPoint]) -> Table:
    headers = ["mechanism", "part", "length", "batch", "training ms", "inference ms", "training memory"]
    headers += ["inference memory", "GFLOPs", "setting", "state"]
    rows = [
        [
            point.mechanism,
            point.part,
            format_number(point.length),
            format_number(point.batch),
            _times(point.training),
            _times(point.inference),
            NOTHING if point.training_bytes is None else format_bytes(point.training_bytes),
            NOTHING if point.inference_bytes is None else format_bytes(point.inference_bytes),
            NOTHING if point.flops is None else format_number(point.flops / 1e9, 2),
            _setting(point.setting),
            f"{point.status}: {point.reason}" if point.reason else point.status,
        ]
        for point in points
    ]
    return Table(headers, rows, list(range(2, 9)), [point.status for point in points])


def _times(timing: Timing | None) -> str:
    """ "12.3 (12.1 to 12.9)"."""
    if timing is None:
        return NOTHING
    return f"{format_number(timing.median, 1)} ({format_number(timing.low, 1)} to {format_number(timing.high, 1)})"


def _epochs(result: Result) -> str:
    """The section on the cost of an epoch, where it was measured."""
    if not result.epochs:
        return ""
    base = next((cost for cost in result.epochs if cost.mechanism == result.baseline), None)
    headers = ["mechanism", "seconds", f"× {result.baseline}", "peak memory", "updates", "setting"]
    rows = [
        [
            cost.mechanism,
            format_number(cost.seconds, 1),
            NOTHING if base is None else format_ratio(cost.seconds / base.seconds),
            NOTHING if cost.peak_bytes is None else format_bytes(cost.peak_bytes),
            format_number(cost.updates),
            _setting(cost.setting),
        ]
        for cost in result.epochs
    ]
    title = '<h2 id="epochs-title">Cost of an epoch of training</h2>'
    shown = _plain(headers, rows, [1, 2, 3, 4])
    return f'<section aria-labelledby="epochs-title">{title}<div class="scroll" tabindex="0">{shown}</div></section>'


def _setting(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items()) or NOTHING
