"""docs/efficiency.md, the whole page, from the numbers of tables.py."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.studies import Study
from subquad.compare.measure.lengths import LengthPoint, Timing
from subquad.compare.report.formatting import format_bytes, format_count, format_number, format_ratio
from tools.markdown import markdown_table

HEAD = """# The originals' efficiency tables

The studies of speed and memory that the original programs report, run again on one machine with the mechanisms of this
project. `make bench-tables` measures everything and writes this page from [efficiency.json](efficiency.json); no figure
is written by hand.

- Every model of a row's length is measured side by side: after a warm-up, rounds that run each of them once. A time is
  the median of the repeats, with their quartiles in brackets. Ratios are to the first model of the same length, and
  below 1 is less time or memory.
- Memory is the peak of what the pass itself allocates; parameters and inputs are not counted. Inference is the loss of
  given targets without gradients, training adds the backward pass.
- Before a model is timed, its mixers must agree with float64 copies of themselves and, where they stream, with their
  streaming form, and all losses and gradients must be finite. What failed or was refused has the reason instead of
  numbers.
- All lengths have the same number of tokens: half the sequences at twice the length.
"""
NOT_MEASURED = "Not measured yet.\n"
PART_NAMES = {"encoder": "the encoder's stack alone", "full": "the whole model"}
HEADERS = [
    "length x batch",
    "model",
    "inference ms",
    "ratio",
    "training ms",
    "ratio",
    "inference memory",
    "ratio",
    "training memory",
    "ratio",
]
NUMERIC = [column for column, header in enumerate(HEADERS) if header != "model"]


def page(report: Mapping[str, Any], studies: Mapping[str, Study]) -> str:
    """The whole page; studies that were not measured say so."""
    sections = [section(study, report["parts"].get(name)) for name, study in studies.items()]
    return "\n".join([HEAD, *sections])


def section(study: Study, found: Mapping[str, Any] | None) -> str:
    text = [f"## {study.title}\n", f"The original: {study.original}\n", f"Here: {study.scaled}\n"]
    if found is None:
        return "\n".join([*text, NOT_MEASURED])
    facts = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
    text += [
        f"<!-- nightly -->\n```sh\n{found['command']}\n```\n",
        f"- machine: {facts}\n- {found['tokens']:,} tokens a batch, float32, {found['repeats']} repeats\n",
        markdown_table(["model", "parameters", "config"], model_rows(found)),
    ]
    for part in dict.fromkeys(point["part"] for point in found["points"]):
        text += [f"{PART_NAMES[part].capitalize()}:\n", markdown_table(HEADERS, rows(found, part, study.baseline))]
    return "\n".join(text)


def model_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What each model is; the JSON file has all options of its mixers at every point."""
    counts: dict[str, list[int]] = {label: [] for label in found["models"]}
    for point in found["points"]:
        if point["parameters"] is not None:
            counts[point["mechanism"]].append(point["parameters"])
    return [
        [label, format_count(max(counts[label])) if counts[label] else "", f"`{json.dumps(model['given'])}`"]
        for label, model in found["models"].items()
    ]


def rows(found: Mapping[str, Any], part: str, baseline: str) -> list[list[str]]:
    """Cells below HEADERS: a row for each model at each length."""
    points = [LengthPoint.model_validate(point) for point in found["points"] if point["part"] == part]
    bases = {point.length: point for point in points if point.mechanism == baseline}
    return [_row(point, bases[point.length]) for point in points]


def _row(point: LengthPoint, base: LengthPoint) -> list[str]:
    start = [f"{format_number(point.length)} x {format_number(point.batch)}", point.mechanism]
    if point.status != "done":
        return [*start, f"{point.status}: {point.reason}", *[""] * (len(HEADERS) - 3)]
    shown = [_milliseconds(point.inference), _milliseconds(point.training)]
    shown += ["" if held is None else format_bytes(held) for held in (point.inference_bytes, point.training_bytes)]
    ratios = [_ratio(own, other) for own, other in zip(_values(point), _values(base), strict=True)]
    return [*start, *(cell for pair in zip(shown, ratios, strict=True) for cell in pair)]


def _values(point: LengthPoint) -> list[float | None]:
    """What has a ratio, in the order of HEADERS; None for what was not measured to the end."""
    if point.status != "done":
        return [None] * 4
    medians = [None if timing is None else timing.median for timing in (point.inference, point.training)]
    return [*medians, point.inference_bytes, point.training_bytes]


def _milliseconds(timing: Timing | None) -> str:
    """ "12.3 (12.1 to 12.9)"."""
    if timing is None:
        return ""
    digits = 0 if timing.median >= 100 else 1 if timing.median >= 10 else 2
    median, low, high = (format_number(value, digits) for value in (timing.median, timing.low, timing.high))
    return f"{median} ({low} to {high})"


def _ratio(own: float | None, base: float | None) -> str:
    """Nothing for a baseline that has no number."""
    return "" if own is None or base is None else format_ratio(own / base)
