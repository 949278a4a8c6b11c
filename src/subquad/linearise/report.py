"""The report of linearising a model: report.json for programs, report.md for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from subquad.compare.report.formatting import format_bytes, format_number
from subquad.evaluate.significance import confidence_interval, paired_test
from subquad.files import write_json, write_text
from subquad.linearise.stages.objective import Score

TITLES = {
    "teacher": "teacher, with its attention",
    "swapped": "after the bare swap",
    "transfer": "after attention transfer",
    "hybrid": "with the attention of the kept layers",
    "finetune": "after fine-tuning",
    "scratch": "control: from scratch with as many updates",
    "identity": "control: the identity, linearised the same way",
}


def describe_scores(scores: Mapping[str, Score]) -> list[dict[str, Any]]:
    """Returns a row for each score: its metrics with intervals, and the differences from the teacher's, paired."""
    teacher = scores["teacher"].measures()
    rows = []
    for name, score in scores.items():
        row: dict[str, Any] = {"name": name, "metrics": {}}
        for metric, measure in score.measures().items():
            interval = confidence_interval(measure)
            found: dict[str, Any] = {
                "value": measure.value,
                "low": interval.low,
                "high": interval.high,
                "better": measure.better,
            }
            if name != "teacher":
                found["minus_teacher"] = asdict(paired_test(measure, teacher[metric]))
            row["metrics"][metric] = found
        rows.append(row)
    return rows


def write_report(folder: Path, content: Mapping[str, Any]) -> None:
    write_json(folder / "report.json", content)
    write_text(folder / "report.md", to_markdown(content))


def to_markdown(content: Mapping[str, Any]) -> str:
    """Returns the report for people."""
    layers = ", ".join(content["layers"])
    lines = [f"# {content['model']}: {content['mechanism']} in place of attention", ""]
    lines += [f"Layers: {layers}. Data: {content['data']}. {_trained(content)}", ""]
    lines += _quality(content["scores"])
    if content["transfer_errors"]:
        lines += [
            "",
            "## Attention transfer",
            "",
            "The error of a layer's output, over the size of the attention's:",
            "",
        ]
        lines += ["| layer | before | after |", "| --- | --- | --- |"]
        for number, (before, after) in content["transfer_errors"].items():
            worse = "" if after <= before else ", not used"
            lines.append(f"| {number} | {before:.4f} | {after:.4f}{worse} |")
    if content["layer_losses"]:
        lines += ["", "## Each layer replaced alone", "", "| layer | loss in nats | |", "| --- | --- | --- |"]
        kept = set(content["kept"])
        for number, loss in content["layer_losses"].items():
            lines.append(f"| {number} | {loss:.4f} | {'keeps attention' if int(number) in kept else 'replaced'} |")
    if content["lengths"]:
        precision = content["lengths"][0]["precision"]
        lines += ["", "## Speed and memory by length", "", f"In {precision}.", "", *_lengths(content["lengths"])]
    if content["decoding"]:
        lines += ["", "## Decoding", "", *_decoding(content["decoding"])]
    lines += ["", "Intervals are of 95 %, by the bootstrap over samples; differences are paired.", ""]
    return "\n".join(lines)


def _trained(content: Mapping[str, Any]) -> str:
    tuned = {"all": "all weights", "lora": "mixers and LoRA's matrices", "none": "nothing"}[content["options"]["tune"]]
    return (
        f"Learned from {content['tokens']:,} {content['unit']}; fine-tuned: {tuned}. Seed {content['options']['seed']}."
    )


def _quality(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    metrics = list(rows[0]["metrics"])
    heads = " | ".join(f"{metric} | minus the teacher's" for metric in metrics)
    lines = [f"| | {heads} |", f"| --- |{' --- | --- |' * len(metrics)}"]
    for row in rows:
        cells = []
        for metric in metrics:
            found = row["metrics"][metric]
            scale, digits = (100, 1) if metric == "accuracy" else (1, 3)
            cells.append(_with_interval(found, "value", scale, digits, sign=False))
            other = found.get("minus_teacher")
            cells.append("" if other is None else _with_interval(other, "difference", scale, digits, sign=True))
        lines.append(f"| {TITLES[row['name']]} | {' | '.join(cells)} |")
    return lines


def _with_interval(found: Mapping[str, Any], key: str, scale: float, digits: int, sign: bool) -> str:
    value, low, high = (format_number(scale * found[name], digits, sign) for name in (key, "low", "high"))
    return f"{value} ({low} to {high})"


def _lengths(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| tokens | | forward | its memory | training | its memory |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        if row["status"] != "done":
            lines.append(f"| {row['length']:,} | {row['variant']} | {row['reason']} | | | |")
            continue
        cells = [
            f"{row[f'{kind}_ms']['median']:.1f} ms | {format_bytes(row[f'{kind}_bytes'])}"
            for kind in ("inference", "training")
        ]
        lines.append(f"| {row['length']:,} | {row['variant']} | {' | '.join(cells)} |")
    return lines


def _decoding(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| after tokens | | tokens a second | its state |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = [row.get("reason", ""), ""]
        if row["status"] == "done":
            cells = [f"{row['tokens_per_second']:.1f}", format_bytes(row["state_bytes"])]
        lines.append(f"| {row['position']:,} | {row['variant']} | {' | '.join(cells)} |")
    return lines
