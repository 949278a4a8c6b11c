"""The search of one mechanism, with validations that follow from a formula instead of a training."""

import json
import math
from pathlib import Path

import pytest

from subquad.compare.plan import Plan
from subquad.compare.tuning.search import Search, check_tunable
from subquad.train.recipe import TrainConfig
from tests.compare.plans import PAIRS, make_plan

pytest.importorskip("optuna", reason="tuning needs the extra tune")

TRIALS = 16


def plan(trials: int = TRIALS) -> Plan:
    recipe = PAIRS.model_copy(update={"train": PAIRS.train.model_copy(update={"updates": 9})})
    return make_plan(recipe, ["local"], tune=trials)


def run(search: Search, number: int, best_rate: float, validations: int = 9) -> None:
    """A trial whose loss falls towards the squared distance of its rate from the best one, in factors of e."""
    trial = search.trial(number)
    settings = search.settings(trial)
    distance = math.log(settings["schedule.lr"] / best_rate) ** 2
    folder = search.folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(1, validations + 1):
            record = {"event": "valid", "update": step, "time": step, "loss": distance + 1 / step}
            file.write(json.dumps(record) + "\n")
            file.flush()
            if search.stops(trial, number):
                break
    search.end(number, None)


def test_the_first_trial_has_the_settings_of_the_recipe(tmp_path: Path) -> None:
    search = Search(tmp_path, plan(), "local")
    assert search.settings(search.trial(0)) == {
        "schedule.lr": 1e-3,
        "optim.weight_decay": 0.0,
        "model.*.norm": "pre",
        "window": 64,
    }


def test_a_best_value_beyond_the_range_is_found(tmp_path: Path) -> None:
    """The range ends at 0.01 at first; the best rate is 0.05."""
    search = Search(tmp_path, plan(), "local")
    for number in range(TRIALS):
        run(search, number, best_rate=0.05)
    found = search.report()
    assert found.chosen["schedule.lr"] > 0.01
    assert len(found.trials) == TRIALS
    stopped = [trial for trial in found.trials if trial.status == "stopped"]
    assert 0 < len(stopped) < TRIALS
    assert all(trial.updates in (1, 3) for trial in stopped), "after the first and the third validation"
    assert min(trial.value or 0 for trial in found.trials if trial.status == "done") < 1.5
    assert search.chosen().settings["schedule.lr"] == found.chosen["schedule.lr"]
    values = {trial.settings["window"] for trial in found.trials}
    assert values == {32, 64, 128}


def test_a_best_value_at_the_edge_is_said(tmp_path: Path) -> None:
    search = Search(tmp_path, plan(3), "local")
    for number in range(3):
        run(search, number, best_rate=1e6)
    assert "schedule.lr" in search.report().edges
    tuned = Search(tmp_path / "inside", plan(), "local")
    for number in range(TRIALS):
        run(tuned, number, best_rate=1e-3)
    assert "schedule.lr" not in tuned.report().edges


def test_an_interrupted_trial_goes_on_with_its_settings(tmp_path: Path) -> None:
    first = Search(tmp_path, plan(), "local")
    run(first, 0, 1e-3)
    drawn = first.settings(first.trial(1))
    again = Search(tmp_path, plan(), "local")
    assert not again.has_ended(1)
    assert again.settings(again.trial(1)) == drawn
    run(again, 1, 1e-3)
    assert Search(tmp_path, plan(), "local").has_ended(1)
    assert len(again.report().trials) == 2


def test_other_trials_draw_other_values_and_the_same_ones_every_time(tmp_path: Path) -> None:
    def draw(out: Path) -> list[float]:
        search = Search(out, plan(), "local")
        rates = []
        for number in range(4):
            rates.append(search.settings(search.trial(number))["schedule.lr"])
            run(search, number, 1e-3)
        return rates

    rates = draw(tmp_path / "a")
    assert len(set(rates)) == 4
    assert draw(tmp_path / "b") == rates


def test_what_diverges_or_fails_is_never_chosen(tmp_path: Path) -> None:
    search = Search(tmp_path, plan(), "local")
    search.settings(search.trial(0))
    assert search.end(0, "the loss was not finite").status == "failed"
    found = search.report()
    assert (found.chosen, found.trials[0].reason) == ({}, "the loss was not finite")
    assert search.chosen() == search.variant, "as it was given"


def test_trainings_by_the_clock_cannot_be_tuned() -> None:
    with pytest.raises(ValueError, match=r"give train\.updates or train\.epochs"):
        check_tunable(TrainConfig(minutes=1))
