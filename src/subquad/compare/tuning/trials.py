"""One trial of a search: a training that successive halving may stop, in a process of its own."""

import os
from pathlib import Path

from subquad.compare.plan import Plan
from subquad.compare.records import TuningTrial
from subquad.compare.subprocesses import Log, run_module
from subquad.compare.trials import LOG, WORKER
from subquad.compare.tuning.search import Search
from subquad.train.run import DATA, train_run


def run_trial(out: Path, plan: Plan, label: str, number: int, log: Log) -> TuningTrial:
    """Computes a trial that has not ended, on from its last checkpoint if it was interrupted; a failure is recorded."""
    search = Search(out, plan, label)
    trial, folder = search.trial(number), search.folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        search.recipe(search.settings(trial))
    except ValueError as error:  # values that do not go together
        return search.end(number, str(error))
    shared, own = out / DATA, folder / DATA
    if shared.exists() and not own.exists():  # tokens are made once for all trials
        own.symlink_to(os.path.relpath(shared, folder))
    ended = run_module(WORKER, ["tune", str(out), label, str(number)], folder / LOG, log)
    return search.end(number, ended.reason if ended.code else None)


def train_trial(out: Path, plan: Plan, label: str, number: int) -> None:
    """What the process of a trial does."""
    search = Search(out, plan, label)
    trial = search.trial(number)
    recipe = search.recipe(search.settings(trial))
    train_run(recipe, search.folder(number), ends_early=lambda: search.stops(trial, number))
