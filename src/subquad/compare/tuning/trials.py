"""The trials of all searches: trainings that successive halving may stop, each in a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from subquad.compare.executors.base import Executor, Piece
from subquad.compare.locks import wait_for_lock
from subquad.compare.plan import Plan, read_plan, write_plan
from subquad.compare.records import Tuning
from subquad.compare.subprocesses import Log, run_module
from subquad.compare.trials import LOG, WORKER, link_data
from subquad.compare.tuning.search import Search
from subquad.train.run import train_run


@dataclass(frozen=True)
class TuningPiece(Piece):
    """The training of one trial: the `number`-th of the search of the mechanism `label`, counted from 0."""

    label: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.label}, tuning {self.number + 1}"

    def is_open(self, out: Path) -> bool:
        return not Search(out, read_plan(out), self.label).has_ended(self.number)

    def execute(self, out: Path, log: Log) -> None:
        search = Search(out, read_plan(out), self.label)
        trial, folder = search.trial(self.number), search.folder(self.number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            search.recipe(search.settings(trial))
        except ValueError as error:  # values that do not go together
            search.end(self.number, str(error))
            return
        link_data(out, folder)
        ended = run_module(WORKER, ["tune", str(out), self.label, str(self.number)], folder / LOG, log)
        search.end(self.number, ended.reason if ended.code else None)

    def log_file(self, out: Path) -> Path:
        return Search(out, read_plan(out), self.label).folder(self.number) / LOG


def train_trial(out: Path, plan: Plan, label: str, number: int) -> None:
    """What the process of a trial does."""
    search = Search(out, plan, label)
    trial = search.trial(number)
    recipe = search.recipe(search.settings(trial))
    train_run(recipe, search.folder(number), ends_early=lambda: search.stops(trial, number))


def open_pieces(plan: Plan, out: Path) -> list[TuningPiece]:
    """The trials that have not ended, one of every mechanism after the other."""
    labels = [variant.label for variant in plan.untuned]
    pieces = [TuningPiece(label, number) for number in range(plan.tune) for label in labels]
    return [piece for piece in pieces if piece.is_open(out)]


def tune(out: Path, plan: Plan, executor: Executor, on_done: Callable[[str], None], log: Log) -> Plan:
    """Runs every search to its end. Returns the plan with the settings that were found, which it writes."""

    def finished(piece: Piece) -> None:
        assert isinstance(piece, TuningPiece)
        trial = Search(out, plan, piece.label).record(piece.number)
        value = "" if trial.value is None else f", {plan.task.metric} {trial.value:.4g}"
        on_done(f"{piece.name}: {trial.status}{value}{f' ({trial.reason})' if trial.reason else ''}")

    executor.run(out, open_pieces(plan, out), finished, log)
    with wait_for_lock(out, "tuning", log):
        tuned = tuple(Search(out, plan, variant.label).chosen() for variant in plan.untuned)
        plan = plan.model_copy(update={"tuned": (*plan.tuned, *tuned)})
        write_plan(plan, out)
    return plan


def searches(out: Path, plan: Plan) -> list[Tuning]:
    """What the searches have tried so far."""
    if not plan.tune:
        return []
    trained = [variant.label for variant in plan.variants if variant.trained]
    return [found for label in trained if (found := Search(out, plan, label).report()).trials]
