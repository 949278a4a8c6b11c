"""The trials of a comparison: one mechanism trained with one seed and evaluated, in a folder of its own.

    OUT/trials/eva-seed1/       a run directory like any other, and beside its files
        log.txt                 what the processes printed
        processes.json          the memory that training took, on which machines and when
        evaluation.json         the metrics, with the statistics of every sample beside it
        trial.json              the record; written last, and not again once it says "done"

The folder of a finished run that is used as a trial holds all but the run. Trainings and evaluations run in processes
of their own (`trial_worker`).
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors.numpy import load_file

from subquad.compare.executors.base import Piece
from subquad.compare.plan import Plan, TrialName, read_plan
from subquad.compare.records import EpochCost, SampleCovariance, Trial
from subquad.compare.run_summary import data_order, describe_run, epoch_cost, read_position_losses, read_scores
from subquad.compare.subprocesses import Log, run_module
from subquad.environment import machine
from subquad.evaluate.measure import Measure
from subquad.evaluate.report import samples_path
from subquad.evaluate.significance import score_covariance
from subquad.files import read_metadata, write_json
from subquad.train.run import DATA

WORKER = "subquad.compare.trial_worker"
FILE, FORMAT = "trial.json", "subquad-trial-1"
LOG, EVALUATION, PROCESSES = "log.txt", "evaluation.json", "processes.json"


class StoredTrial(NamedTuple):
    """The content of trial.json. epoch: what an epoch costs, where the run tells."""

    trial: Trial
    epoch: EpochCost | None


class TrainingProcesses(NamedTuple):
    """The content of processes.json, of all processes that a training took.

    machines: see `environment.machine`. spans: when each process began and ended, in seconds of the machine's clock.
    """

    peak_bytes: int
    machines: list[str]
    spans: list[tuple[float, float]]


class Trials:
    """All trials of a comparison."""

    def __init__(self, out: Path, plan: Plan) -> None:
        """out: the folder of the comparison."""
        self.out, self.plan = out, plan

    # ------------------------------------------------------------------ what there is

    def folder(self, name: TrialName) -> Path:
        return self.out / "trials" / f"{self.plan.variant(name.label).slug}-seed{name.seed}"

    def run_folder(self, name: TrialName) -> Path:
        """The trial's own folder, or that of the finished run that is used instead."""
        return self.plan.finished_run(name) or self.folder(name)

    def stored(self, name: TrialName) -> StoredTrial | None:
        """The record of a trial that has ended; None: it has not."""
        path = self.folder(name) / FILE
        if not path.exists():
            return None
        content = read_metadata(path, FORMAT, "trial of a comparison")
        if content["key"] != self.plan.trial_key(name):
            made = f"{path.parent} was made by another recipe or comparison"
            raise ValueError(f"{made}; take it out of {self.out / 'trials'}")
        epoch = content["epoch"]
        return StoredTrial(Trial.model_validate(content["trial"]), EpochCost.model_validate(epoch) if epoch else None)

    def first_done(self) -> dict[str, TrialName]:
        """The first finished trial of every mechanism that has one."""
        found: dict[str, TrialName] = {}
        for name in self.plan.trials():
            stored = self.stored(name)
            if stored is not None and stored.trial.status == "done":
                found.setdefault(name.label, name)
        return found

    # ------------------------------------------------------------------ computing

    def open(self, names: Sequence[TrialName], retry: bool) -> list[TrialName]:
        """Those that are not computed yet. retry: failed ones count as such."""
        return [name for name in names if self.is_open(name, retry)]

    def is_open(self, name: TrialName, retry: bool) -> bool:
        stored = self.stored(name)
        return stored is None or (stored.trial.status != "done" and retry)

    def run(self, name: TrialName, log: Log) -> Trial:
        """Trains if the run is missing or unfinished, evaluates, and writes the record; a failure is recorded, too."""
        folder, run = self.folder(name), self.run_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        failure = self._train(name, log) if run == folder else None
        failure = failure or self._evaluate(name, log)
        trial, epoch = Trial(mechanism=name.label, seed=name.seed, run=os.path.relpath(run, self.out)), None
        try:
            describe_run(trial, run)
        except ValueError as error:  # none of its checkpoints can be read, for one
            failure = failure or str(error)
        processes = _stored_processes(folder)
        if processes.machines:
            trial.setting |= {"machine": ", ".join(processes.machines)}
        trial.training_spans = processes.spans
        if processes.peak_bytes:
            trial.peak_bytes = processes.peak_bytes
            trial.setting |= {"memory": "resident peak of the training process"}
        if failure is None:
            trial.status = "done"
            trial.scores = read_scores(folder / EVALUATION, self.plan.task)
            trial.loss_by_position = read_position_losses(folder / EVALUATION)
            trial.per_sample = os.path.relpath(samples_path(folder / EVALUATION), self.out)
            if (order := data_order(run)) is not None:
                trial.data_order, epoch = order.checksum, epoch_cost(trial, run, order)
        else:
            trial.reason = failure
            trial.status = "failed"
        content = {"format": FORMAT, "key": self.plan.trial_key(name), "trial": trial.model_dump(mode="json")}
        write_json(folder / FILE, {**content, "epoch": None if epoch is None else epoch.model_dump(mode="json")})
        return trial

    def _train(self, name: TrialName, log: Log) -> str | None:
        """Why training failed, or None."""
        folder = self.folder(name)
        link_data(self.out, folder)
        before = _stored_processes(folder)
        processes = before._replace(machines=sorted({*before.machines, machine()}))
        write_json(folder / PROCESSES, processes._asdict())
        began = time.time()
        ended = run_module(WORKER, ["train", str(self.out), name.label, str(name.seed)], folder / LOG, log)
        peak = max(before.peak_bytes, ended.peak_bytes or 0)
        spans = [*before.spans, (began, time.time())]
        write_json(folder / PROCESSES, processes._replace(peak_bytes=peak, spans=spans)._asdict())
        return f"training: {ended.reason}" if ended.code else None

    def _evaluate(self, name: TrialName, log: Log) -> str | None:
        """Why evaluation failed, or None."""
        arguments = ["evaluate", str(self.out), name.label, str(name.seed)]
        ended = run_module(WORKER, arguments, self.folder(name) / LOG, log)
        return f"evaluation: {ended.reason}" if ended.code else None

    # ------------------------------------------------------------------ test samples

    def sample_covariance(self, names: Sequence[TrialName]) -> SampleCovariance | None:
        """Of the scores of finished trials, in units of the main metric; those of other samples than the first's are
        left out."""
        metric = self.plan.task.main_metric
        measures: dict[TrialName, Measure] = {}
        first = None
        for name in names:
            path = self.folder(name) / EVALUATION
            content = json.loads(path.read_text())
            signature = content["metrics"][metric.key]["signature"]
            samples = (content["data"]["sha256"], signature)
            first = samples if first is None else first
            if samples == first:
                measures[name] = Measure(load_file(samples_path(path))[metric.key], metric.score, signature)
        if not measures:
            return None
        values = metric.scale**2 * score_covariance(list(measures.values()))
        count = len(next(iter(measures.values())).statistics)
        return SampleCovariance(trials=list(measures), values=values.tolist(), samples=count)


def link_data(out: Path, folder: Path) -> None:
    """Gives a run the tokens of the comparison `out`, which are made once for all trials."""
    shared, own = out / DATA, folder / DATA
    if shared.exists() and not own.exists():
        own.symlink_to(os.path.relpath(shared, folder))


def _stored_processes(folder: Path) -> TrainingProcesses:
    path = folder / PROCESSES
    return TrainingProcesses(**json.loads(path.read_text())) if path.exists() else TrainingProcesses(0, [], [])


@dataclass(frozen=True)
class TrialPiece(Piece):
    """A trial as a piece of work. retry: whether it is done again if it failed."""

    trial: TrialName
    retry: bool

    @property
    def name(self) -> str:
        return str(self.trial)

    def is_open(self, out: Path) -> bool:
        return _trials(out).is_open(self.trial, self.retry)

    def execute(self, out: Path, log: Log) -> None:
        _trials(out).run(self.trial, log)

    def log_file(self, out: Path) -> Path:
        return _trials(out).folder(self.trial) / LOG


def _trials(out: Path) -> Trials:
    return Trials(out, read_plan(out))
