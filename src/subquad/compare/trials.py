"""A cell: one mechanism trained with one seed and evaluated, in a folder of its own.

    OUT/cells/eva-seed1/        the run directory of `subquad train`, and beside its files
        given.yaml              the recipe
        log.txt                 what the processes said
        evaluation.json         what `subquad evaluate` found, with the statistics of every sample beside it
        cell.json               the result; written last, and not again once it says "done"

The folder of a finished run that was taken as a cell holds all but the run.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import yaml
from safetensors.numpy import load_file

from subquad.compare.plan import CellName, Plan
from subquad.compare.report.schema import Cell, EpochCost, Paired
from subquad.compare.run_summary import describe_run, epoch_cost, order_of, scores_of
from subquad.compare.subprocesses import Say, run_module
from subquad.evaluate.measure import Measure
from subquad.evaluate.report import samples_path
from subquad.evaluate.significance import paired
from subquad.files import read_metadata, write_json
from subquad.tasks import task_class

COMMANDS = "subquad.cli.main"
FILE, FORMAT = "cell.json", "subquad-cell-1"
GIVEN, LOG, EVALUATION, PEAK = "given.yaml", "log.txt", "evaluation.json", "peak.json"


class Stored(NamedTuple):
    """The content of cell.json. epoch: what an epoch costs, where the run tells."""

    cell: Cell
    epoch: EpochCost | None


def cell_folder(out: Path, plan: Plan, name: CellName) -> Path:
    return out / "cells" / f"{plan.variant(name.label).slug}-seed{name.seed}"


def stored_cell(out: Path, plan: Plan, name: CellName) -> Stored | None:
    """What is known about a cell that has ended; None: it has not."""
    path = cell_folder(out, plan, name) / FILE
    if not path.exists():
        return None
    content = read_metadata(path, FORMAT, "cell of a comparison")
    if content["key"] != plan.key_of(name):
        raise ValueError(f"{path.parent} was made by another recipe or comparison; take it out of {out / 'cells'}")
    epoch = content["epoch"]
    return Stored(Cell.model_validate(content["cell"]), EpochCost.model_validate(epoch) if epoch else None)


def run_cell(out: Path, plan: Plan, name: CellName, say: Say) -> Cell:
    """Trains where a run is missing or unfinished, evaluates, and writes the result; a failure is a result too."""
    folder = cell_folder(out, plan, name)
    folder.mkdir(parents=True, exist_ok=True)
    run = plan.run_of(name) or folder
    failure = _train(out, plan, name, say) if run == folder else None
    if failure is None:
        words = ["evaluate", str(run), "--split", plan.split, "--out", str(folder / EVALUATION)]
        ended = run_module(COMMANDS, words, folder / LOG, lambda line: say(line) if line.startswith("[") else None)
        failure = f"evaluation: {ended.reason}" if ended.code else None
    cell = Cell(mechanism=name.label, seed=name.seed, run=os.path.relpath(run, out))
    try:
        describe_run(cell, run)
    except ValueError as error:  # none of its checkpoints can be read, for one
        failure = failure or str(error)
    if peak := _stored_peak(folder):
        cell.peak_bytes = peak
        cell.setting |= {"memory": "resident peak of the training process"}
    epoch = None
    if failure is None:
        cell.status = "done"
        cell.scores = scores_of(folder / EVALUATION, plan.recipe["task"])
        cell.per_sample = os.path.relpath(samples_path(folder / EVALUATION), out)
        if (order := order_of(run)) is not None:
            cell.data_order, epoch = order.checksum, epoch_cost(cell, run, order)
    else:
        cell.reason = failure
        cell.status = "failed"
    content = {"format": FORMAT, "key": plan.key_of(name), "cell": cell.model_dump(mode="json")}
    write_json(folder / FILE, {**content, "epoch": None if epoch is None else epoch.model_dump(mode="json")})
    return cell


def _train(out: Path, plan: Plan, name: CellName, say: Say) -> str | None:
    """Why training failed, or None."""
    folder = cell_folder(out, plan, name)
    (folder / GIVEN).write_text(yaml.safe_dump(plan.recipe_of(name), sort_keys=False))
    shared, own = out / "data", folder / "data"
    if shared.exists() and not own.exists():  # tokens are made once for all cells
        own.symlink_to(os.path.relpath(shared, folder))
    ended = run_module(COMMANDS, ["train", str(folder / GIVEN), "--out", str(folder)], folder / LOG, say)
    peak = max(_stored_peak(folder), ended.peak_bytes or 0)  # of all the processes that a run took
    write_json(folder / PEAK, {"peak_bytes": peak})
    return f"training: {ended.reason}" if ended.code else None


def _stored_peak(folder: Path) -> int:
    path = folder / PEAK
    return json.loads(path.read_text())["peak_bytes"] if path.exists() else 0


# ---------------------------------------------------------------------- two cells of a seed


def paired_cells(out: Path, plan: Plan, ours: CellName, base: CellName) -> Paired | None:
    """The difference in the metric on the same samples; None if the two were evaluated on different ones."""
    metric = task_class(plan.recipe["task"]).main_metric
    main = metric.key
    measures, samples = [], []
    for name in (ours, base):
        path = cell_folder(out, plan, name) / EVALUATION
        content = json.loads(path.read_text())
        samples.append((content["data"]["sha256"], content["metrics"][main]["signature"]))
        statistics = load_file(samples_path(path))[main]
        measures.append(Measure(statistics, metric.score, content["metrics"][main]["signature"]))
    if samples[0] != samples[1]:
        return None
    first, second = measures
    found = paired(first, second)
    scale = metric.scale
    return Paired(
        mechanism=ours.label,
        seed=ours.seed,
        difference=scale * found.difference,
        low=scale * found.low,
        high=scale * found.high,
        p_value=found.p_value,
        samples=len(first.statistics),
        method=f"paired bootstrap, {found.resamples:,} resamples",
    )
