"""`subquad bench` of whole models: what an epoch of a recipe costs, and what a preset costs by length."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.cli.output import print_table
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.compare.measure.presets import PresetPlan


def bench_recipe(
    recipe: Path, changes: Sequence[str], mixers: Sequence[str], updates: int, out: Path | None, as_json: bool
) -> None:
    """Time and memory of an epoch and of the run, for each mechanism in the recipe's model."""
    from tempfile import TemporaryDirectory

    from subquad.compare.measure.training import WARMUP, measure_training
    from subquad.train.recipe import read_recipe

    read = read_recipe(recipe, changes)
    with TemporaryDirectory() as data, Progress(updates) as progress:
        found = measure_training(
            read,
            mixers,
            Path(data),
            updates=updates,
            on_round=lambda done: progress.update(f"{done} of {updates} updates timed", done),
        )
    rows = [cost.to_json() for cost in found]
    report = {
        "recipe": str(recipe),
        "changes": [*changes],
        "warm-up updates": WARMUP,
        "threads": _threads(),
        "rows": rows,
    }
    if not as_json:
        first = found[0]
        cells = [
            [
                cost.mechanism,
                f"{cost.parameters:,}",
                f"{1000 * cost.seconds:,.1f}",
                f"{1000 * cost.low:,.1f} to {1000 * cost.high:,.1f}",
                f"{first.seconds / cost.seconds:.2f}",
                _duration(cost.epoch_seconds),
                _duration(cost.run_seconds),
                f"{cost.peak_bytes / 2**20:,.1f}",
            ]
            for cost in found
        ]
        headers = [
            "mechanism",
            "parameters",
            "ms an update",
            "quartiles",
            f"x {first.mechanism}",
            "an epoch",
            "the run",
        ]
        print_table([*headers, "peak MiB"], cells, numeric=range(1, 8))
        print(
            f"Epochs ({first.epoch_updates:,} updates) and runs are extrapolated from {first.timed_updates} updates, "
            "without validations and checkpoints. The memory is that of one update, besides weights and averages."
        )
    _write(report, rows, out, as_json)


def bench_preset(plan: "PresetPlan", out: Path | None, as_json: bool) -> None:
    """Time and memory of a preset by length."""
    from subquad.compare.measure.presets import measure_preset

    with Progress(len(plan.lengths)) as progress:
        found = measure_preset(plan, progress)
    rows: list[dict[str, Any]] = []
    for shape, costs in found.items():
        row: dict[str, Any] = {"length": shape.length, "batch": shape.batch, "status": costs.status}
        for kind, seconds in costs.seconds.items():
            row |= {f"{kind}_seconds": sorted(seconds)[len(seconds) // 2], f"{kind}_bytes": costs.peak_bytes[kind]}
        rows.append(row | ({} if costs.reason is None else {"reason": costs.reason}))
    report = {"preset": plan.name, "part": plan.part, "device": plan.device, "dtype": plan.dtype, "threads": _threads()}
    if not as_json:
        cells = [
            [
                f"{row['length']:,}",
                str(row["batch"]),
                *(_shown(row.get(f"{kind}_seconds"), 1e-3) for kind in ("inference", "training")),
                *(_shown(row.get(f"{kind}_bytes"), 2**20) for kind in ("inference", "training")),
                row.get("reason", ""),
            ]
            for row in rows
        ]
        headers = ["length", "batch", "inference ms", "training ms", "inference MiB", "training MiB", ""]
        print_table(headers, cells, numeric=range(6))
    _write(report | {"rows": rows}, rows, out, as_json)


def _write(report: dict[str, Any], rows: Sequence[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    """Writes JSON, or the rows as CSV if the file's name ends so."""
    from subquad.files import write_text

    if as_json:
        print(json.dumps(report, indent=2))
    if out is None:
        return
    if out.suffix != ".csv":
        write_text(out, json.dumps(report, indent=2) + "\n")
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out, text.getvalue())


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _shown(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.1f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
