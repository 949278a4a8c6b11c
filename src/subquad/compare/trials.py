"""A trial: one mechanism trained with one seed and evaluated, in a folder of its own.

    OUT/trials/eva-seed1/        the run directory of `subquad train`, and beside its files
        given.yaml              the recipe
        log.txt                 what the processes said
        evaluation.json         what `subquad evaluate` found, with the statistics of every sample beside it
        trial.json               the result; written last, and not again once it says "done"

The folder of a finished run that was taken as a trial holds all but the run.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import yaml
from safetensors.numpy import load_file

from subquad.compare.plan import Plan, TrialName
from subquad.compare.report.schema import EpochCost, Paired, Trial
from subquad.compare.run_summary import describe_run, epoch_cost, order_of, scores_of
from subquad.compare.subprocesses import Log, run_module
from subquad.evaluate.measure import Measure
from subquad.evaluate.report import samples_path
from subquad.evaluate.significance import paired
from subquad.files import read_metadata, write_json
from subquad.tasks import task_class

COMMANDS = "subquad.cli.main"
FILE, FORMAT = "trial.json", "subquad-trial-1"
GIVEN, LOG, EVALUATION, PEAK = "given.yaml", "log.txt", "evaluation.json", "peak.json"


class Stored(NamedTuple):
    """The content of trial.json. epoch: what an epoch costs, where the run tells."""

    trial: Trial
    epoch: EpochCost | None


def trial_folder(out: Path, plan: Plan, name: TrialName) -> Path:
    return out / "trials" / f"{plan.variant(name.label).slug}-seed{name.seed}"


def stored_trial(out: Path, plan: Plan, name: TrialName) -> Stored | None:
    """What is known about a trial that has ended; None: it has not."""
    path = trial_folder(out, plan, name) / FILE
    if not path.exists():
        return None
    content = read_metadata(path, FORMAT, "trial of a comparison")
    if content["key"] != plan.key_of(name):
        raise ValueError(f"{path.parent} was made by another recipe or comparison; take it out of {out / 'trials'}")
    epoch = content["epoch"]
    return Stored(Trial.model_validate(content["trial"]), EpochCost.model_validate(epoch) if epoch else None)


def run_trial(out: Path, plan: Plan, name: TrialName, say: Log) -> Trial:
    """Trains where a run is missing or unfinished, evaluates, and writes the result; a failure is a result too."""
    folder = trial_folder(out, plan, name)
    folder.mkdir(parents=True, exist_ok=True)
    run = plan.run_of(name) or folder
    failure = _train(out, plan, name, say) if run == folder else None
    if failure is None:
        words = ["evaluate", str(run), "--split", plan.split, "--out", str(folder / EVALUATION)]
        ended = run_module(COMMANDS, words, folder / LOG, lambda line: say(line) if line.startswith("[") else None)
        failure = f"evaluation: {ended.reason}" if ended.code else None
    trial = Trial(mechanism=name.label, seed=name.seed, run=os.path.relpath(run, out))
    try:
        describe_run(trial, run)
    except ValueError as error:  # none of its checkpoints can be read, for one
        failure = failure or str(error)
    if peak := _stored_peak(folder):
        trial.peak_bytes = peak
        trial.setting |= {"memory": "resident peak of the training process"}
    epoch = None
    if failure is None:
        trial.status = "done"
        trial.scores = scores_of(folder / EVALUATION, plan.recipe["task"])
        trial.per_sample = os.path.relpath(samples_path(folder / EVALUATION), out)
        if (order := order_of(run)) is not None:
            trial.data_order, epoch = order.checksum, epoch_cost(trial, run, order)
    else:
        trial.reason = failure
        trial.status = "failed"
    content = {"format": FORMAT, "key": plan.key_of(name), "trial": trial.model_dump(mode="json")}
    write_json(folder / FILE, {**content, "epoch": None if epoch is None else epoch.model_dump(mode="json")})
    return trial


def _train(out: Path, plan: Plan, name: TrialName, say: Log) -> str | None:
    """Why training failed, or None."""
    folder = trial_folder(out, plan, name)
    (folder / GIVEN).write_text(yaml.safe_dump(plan.recipe_of(name), sort_keys=False))
    shared, own = out / "data", folder / "data"
    if shared.exists() and not own.exists():  # tokens are made once for all trials
        own.symlink_to(os.path.relpath(shared, folder))
    ended = run_module(COMMANDS, ["train", str(folder / GIVEN), "--out", str(folder)], folder / LOG, say)
    peak = max(_stored_peak(folder), ended.peak_bytes or 0)  # of all the processes that a run took
    write_json(folder / PEAK, {"peak_bytes": peak})
    return f"training: {ended.reason}" if ended.code else None


def _stored_peak(folder: Path) -> int:
    path = folder / PEAK
    return json.loads(path.read_text())["peak_bytes"] if path.exists() else 0


# ---------------------------------------------------------------------- two trials of a seed


def paired_trials(out: Path, plan: Plan, ours: TrialName, base: TrialName) -> Paired | None:
    """The difference in the metric on the same samples; None if the two were evaluated on different ones."""
    metric = task_class(plan.recipe["task"]).main_metric
    main = metric.key
    measures, samples = [], []
    for name in (ours, base):
        path = trial_folder(out, plan, name) / EVALUATION
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
