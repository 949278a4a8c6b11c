"""The search for the settings of one mechanism: successive halving on validation, by Optuna.

    OUT/tuning/eva.journal      Optuna's study: what was tried, every validation, how it ended
    OUT/tuning/eva-3/           the run directory of a trial, without weights once it has ended

Every mechanism gets the same number of trials. The first has the settings that the mechanism would have untuned; the
others are drawn, at first at random and then where the best ones were. A training is validated nine times; after the
first and the third time it goes on only if it is in the best third of those that came as far. The range of a number
always reaches beyond the best value so far, so that a best value at its edge extends it.
"""

import json
import math
import shutil
import zlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.compare.matching import match_parameters
from subquad.compare.plan import Plan
from subquad.compare.records import Tuning, TuningTrial
from subquad.compare.tuning.space import LogRange, SearchSpace, Values
from subquad.compare.variants import Variant, variant_recipe
from subquad.packages import require
from subquad.train.checkpoint import checkpoint_folder
from subquad.train.metrics_log import read_metrics
from subquad.train.recipe import Recipe, TrainConfig
from subquad.train.run import METRICS

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

REDUCTION, VALIDATIONS = 3, 9
"""A third of the trainings goes on after each rung; the validations of a whole training."""
HALVED = 0.3
"""About the share of a whole training that a trial takes, if a third of them goes on at each rung."""
BEYOND = 3.0
"""How far the range of a number reaches beyond its best value: so many times."""
NEXT_TRIED = 1.1
"""A value of a number is at the edge of what was tried if no other is beyond this many times it."""
SEEDS_APART = 100_000
"""Trainings of a search have another seed than those that are compared."""
NUMBER, STOPPED, REASON = "number", "stopped", "reason"


class Search:
    """The search of the mechanism `label`. Several processes may work on one at once."""

    def __init__(self, out: Path, plan: Plan, label: str) -> None:
        self.plan, self.label = plan, label
        self.variant = next(variant for variant in plan.variants if variant.label == label)
        self.space = SearchSpace(plan, self.variant)
        self.base = out / "tuning" / self.variant.slug

    def folder(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.base.with_name(f"{self.base.name}-{number}")

    # ------------------------------------------------------------------ Optuna's study

    @cached_property
    def study(self) -> "Study":
        optuna = require("optuna", "tuning", "tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.base.parent.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(f"{self.base}.journal")
        return optuna.create_study(
            study_name=self.label,
            storage=optuna.storages.JournalStorage(backend),
            direction="maximize" if self.plan.task.better == "higher" else "minimize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION),
            load_if_exists=True,
        )

    def _trials(self) -> dict[int, "FrozenTrial"]:
        """The trials by their numbers; one that a process left before it had a number is none."""
        found = {trial.user_attrs[NUMBER]: trial for trial in self.study.trials if NUMBER in trial.user_attrs}
        return dict(sorted(found.items()))

    def trial(self, number: int) -> "Trial":
        """A trial that has not ended: a new one, or one that another process has begun."""
        optuna = require("optuna", "tuning", "tune")
        known = self._trials().get(number)
        if known is not None:
            return optuna.trial.Trial(self.study, known._trial_id)
        seed = zlib.crc32(f"{self.label} {number}".encode())  # one seed for all would draw the same for all
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(2, self.plan.tune // 2))
        if number == 0:
            own = {name: _encode(dimension, dimension.own) for name, dimension in self.space.dimensions.items()}
            self.study.enqueue_trial(own, skip_if_exists=True)
        trial = self.study.ask()
        trial.set_user_attr(NUMBER, number)
        return trial

    def settings(self, trial: "Trial") -> dict[str, Any]:
        """What the trial tries: drawn the first time, and the same whenever it is asked for again."""
        best = self._best()
        chosen = {}
        for name, dimension in self.space.dimensions.items():
            if isinstance(dimension, Values):
                found: Any = trial.suggest_categorical(name, [_encode(dimension, value) for value in dimension.values])
            else:
                centre = dimension.own if best is None else best.params.get(name, dimension.own)
                low, high = min(dimension.low, centre / BEYOND), max(dimension.high, centre * BEYOND)
                found = trial.suggest_float(name, low, high, log=True)
            chosen[name] = _decode(dimension, found)
        return chosen

    # ------------------------------------------------------------------ one trial

    def has_ended(self, number: int) -> bool:
        trial = self._trials().get(number)
        return trial is not None and trial.state.is_finished()

    def recipe(self, settings: dict[str, Any]) -> Recipe:
        """The recipe of a trial."""
        content = variant_recipe(self.plan.recipe, self.tuned_variant(settings))
        train = content["train"]
        changes = {"seed": train["seed"] + SEEDS_APART, "validate_every": validation_interval(train)}
        return Recipe.parse(self.label, {**content, "train": {**train, **changes}})

    def tuned_variant(self, settings: dict[str, Any]) -> Variant:
        """The mechanism with these settings, and with as many parameters as the baseline if that is wanted."""
        variant = self.space.apply(settings)
        if self.plan.match == "none" or variant.label == self.plan.labels[0]:
            return variant
        recipe = Recipe.parse(self.label, self.plan.recipe)
        return match_parameters(recipe, [self.plan.variants[0], variant], self.plan.data_dependent_model_config)[1]

    def stops(self, trial: "Trial", number: int) -> bool:
        """Reports the validations so far; whether the training is to be stopped."""
        values = self._validations(number)
        for step, value in enumerate(values, 1):
            if step not in self.study.trials[trial.number].intermediate_values:
                trial.report(value, step)
        # Optuna would compare trainings that have come to their end as well.
        stops = len(values) < count_validations(self.plan.recipe["train"]) and bool(trial.should_prune())
        if stops:
            trial.set_user_attr(STOPPED, True)
        return stops

    def end(self, number: int, failure: str | None) -> TuningTrial:
        """Records how a trial ended, and removes its weights."""
        states = require("optuna", "tuning", "tune").trial.TrialState
        trial, values = self._trials()[number], self._validations(number)
        if failure is not None or not values:
            self.trial(number).set_user_attr(REASON, failure or "it was never validated")
            self.study.tell(trial.number, state=states.FAIL)
        elif trial.user_attrs.get(STOPPED):
            self.study.tell(trial.number, state=states.PRUNED)
        else:
            best = max(values) if self.plan.task.better == "higher" else min(values)
            self.study.tell(trial.number, best)
        shutil.rmtree(checkpoint_folder(self.folder(number)), ignore_errors=True)
        return self.record(number)

    def _validations(self, number: int) -> list[float]:
        """The validations of a trial, infinite where they are not finite."""
        path = self.folder(number) / METRICS
        worst = -math.inf if self.plan.task.better == "higher" else math.inf
        values = [record[self.plan.task.metric] for record in read_metrics(path, "valid")] if path.exists() else []
        return [value if isinstance(value, int | float) else worst for value in values]

    # ------------------------------------------------------------------ what was found

    def _best(self) -> "FrozenTrial | None":
        """The best of the trials that came to their end."""
        try:
            return self.study.best_trial
        except ValueError:  # none has yet
            return None

    def chosen(self) -> Variant:
        """The mechanism with the best settings; as it was given if no trial came to its end."""
        settings = self._decoded(best) if (best := self._best()) is not None else {}
        return self.tuned_variant(settings) if settings else self.variant

    def report(self) -> Tuning:
        """The search so far."""
        best, task = self._best(), self.plan.task
        trials = {number: trial for number, trial in self._trials().items() if trial.state.is_finished()}
        settings = {} if best is None else self._decoded(best)
        tried = [self._decoded(trial) for trial in trials.values()]
        return Tuning(
            mechanism=self.label,
            metric=task.metric,
            better=task.better,
            trials=[self.record(number) for number in trials],
            chosen=settings,
            edges=[name for name in settings if _is_at_edge(self.space.dimensions[name], name, settings, tried)],
        )

    def _decoded(self, trial: "FrozenTrial") -> dict[str, Any]:
        return {name: _decode(self.space.dimensions[name], value) for name, value in trial.params.items()}

    def record(self, number: int) -> TuningTrial:
        """What is known of a trial that has ended."""
        trial = self._trials()[number]
        path = self.folder(number) / METRICS
        records = read_metrics(path, "valid") if path.exists() else []
        values = [value for value in self._validations(number) if math.isfinite(value)]
        best = (max if self.plan.task.better == "higher" else min)(values, default=None)
        reason = trial.user_attrs.get(REASON)
        status = "failed" if reason is not None else "stopped" if trial.user_attrs.get(STOPPED) else "done"
        updates = max((record["update"] for record in records), default=0)
        return TuningTrial(settings=self._decoded(trial), status=status, value=best, updates=updates, reason=reason)


def validation_interval(train: dict[str, Any]) -> int | None:
    """The updates between two validations of a trial; None: an epoch."""
    return None if train["updates"] is None else math.ceil(train["updates"] / VALIDATIONS)


def count_validations(train: dict[str, Any]) -> int:
    """The validations of a whole training."""
    every = validation_interval(train)
    return train["epochs"] if every is None else math.ceil(train["updates"] / every)


def check_tunable(train: TrainConfig) -> None:
    """Refuses a recipe whose trainings have no common length."""
    if train.updates is None and train.epochs is None:
        raise ValueError("tuning compares trainings of one length: give train.updates or train.epochs, not minutes")


def _encode(dimension: LogRange | Values, value: Any) -> Any:
    """Choices are text for Optuna: it knows no lists."""
    return json.dumps(value) if isinstance(dimension, Values) else value


def _decode(dimension: LogRange | Values, value: Any) -> Any:
    return json.loads(value) if isinstance(dimension, Values) else value


def _is_at_edge(dimension: LogRange | Values, name: str, chosen: dict[str, Any], tried: list[dict[str, Any]]) -> bool:
    """Whether nothing was tried on one side of the best value of a number."""
    value = chosen[name]
    if isinstance(dimension, Values):
        return _are_ordered(dimension.values) and value in (dimension.values[0], dimension.values[-1]) and value != 0
    others = [each[name] for each in tried if name in each]
    return max(others) <= value * NEXT_TRIED or min(others) >= value / NEXT_TRIED


def _are_ordered(values: tuple[Any, ...]) -> bool:
    return len(values) > 2 and all(isinstance(value, int | float) for value in values)
