"""Whether the mechanisms of a result were compared under the same conditions, and what their trials took."""

import statistics
from itertools import pairwise
from typing import Literal

from subquad.compare.matching import TOLERANCE
from subquad.compare.report.result import Result

TrialNumber = Literal["parameters", "training_seconds", "tokens_per_second", "peak_bytes"]


def trial_mean(result: Result, label: str, field: TrialNumber) -> float | None:
    """Mean over the finished runs that know the number."""
    values = [value for trial in result.trials_of(label) if (value := getattr(trial, field)) is not None]
    return statistics.fmean(values) if values else None


def machines(result: Result) -> list[str]:
    """The machines that finished trainings ran on; one that does not say so is known by its processor."""
    settings = [trial.setting for trial in result.trials if trial.status == "done"]
    named = [setting["machine"].split(", ") if "machine" in setting else [setting.get("cpu")] for setting in settings]
    return sorted({str(name) for names in named for name in names})


def ran_at_once(result: Result) -> bool:
    """Whether two finished trainings ran on one machine at the same time, and so slowed one another down."""
    spans = sorted(span for trial in result.trials if trial.status == "done" for span in trial.training_spans)
    return len(machines(result)) <= 1 and any(end > begin for (_, end), (begin, _) in pairwise(spans))


def why_times_differ(result: Result) -> str | None:
    """Why the times of trainings say nothing about mechanisms; None: they can be compared."""
    if len(names := machines(result)) > 1:
        return f"Trainings ran on several machines ({', '.join(names)}): their times are not compared."
    if ran_at_once(result):
        return "Several trainings ran on the machine at once and slowed one another down: their times are not compared."
    return None


def parameters(result: Result, label: str) -> int | None:
    return next((trial.parameters for trial in result.trials_of(label) if trial.parameters is not None), None)


def parameter_mismatch(result: Result) -> dict[str, float]:
    """Relative difference to the baseline, of the mechanisms whose models are not matched to it."""
    base = parameters(result, result.baseline)
    if not base:
        return {}
    counts = {label: parameters(result, label) for label in result.competitors}
    shares = {label: count / base - 1 for label, count in counts.items() if count is not None}
    return {label: share for label, share in shares.items() if abs(share) > TOLERANCE}


def same_data_order(result: Result) -> bool | None:
    """Whether all runs of a seed saw the same batches in the same order; None where a run does not say."""
    done = [trial for trial in result.trials if trial.status == "done"]
    if not done or any(trial.data_order is None for trial in done):
        return None
    orders: dict[int, set[str | None]] = {}
    for trial in done:
        orders.setdefault(trial.seed, set()).add(trial.data_order)
    return all(len(found) == 1 for found in orders.values())
