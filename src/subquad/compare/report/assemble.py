"""From the files of a comparison to its result: what is missing or failed is in it, too."""

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import subquad
from subquad.compare.measure.approximation import not_comparable_reason
from subquad.compare.measure.cache import (
    length_steps,
    stored_approximation,
    stored_decoding,
    stored_lengths,
    trained_runs,
)
from subquad.compare.plan import Plan, TrialName
from subquad.compare.report.formatting import join_words
from subquad.compare.report.schema import EpochCost, Mechanism, Paired, Result, Trial
from subquad.compare.run_summary import metric_of
from subquad.compare.trials import Stored, paired_trials, stored_trial
from subquad.environment import environment
from subquad.mixers import available
from subquad.tasks import task_class


def assemble(out: Path, plan: Plan, baseline: str, title: str, command: str) -> Result:
    """The result of everything that is in the folder."""
    metric = metric_of(plan.recipe["task"])
    stored = {name: stored_trial(out, plan, name) for name in plan.trials()}
    trials = _trials(out, plan, stored)
    counts = [score.samples for trial in trials for score in trial.scores.values() if score.samples is not None]
    if counts:
        chance_level = task_class(plan.recipe["task"]).chance_level
        metric = metric.model_copy(update={"floor": chance_level(plan.decided, counts[0])})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = Result(
        title=title,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        task=plan.recipe["task"],
        metric=metric,
        baseline=baseline,
        mechanisms=[Mechanism(label=v.label, mixer=v.mixer, options=v.options) for v in plan.variants],
        recipe=plan.recipe,
        environment={"subquad": subquad.__version__, **environment(device)},
        trials=trials,
        paired=_pairs(out, plan, stored, baseline),
        lengths=[point for step in length_steps(plan) for point in stored_lengths(out, plan, *step) or ()],
        epochs=_epochs([found for found in stored.values() if found is not None]),
        notes=_notes(out, plan, baseline),
    )
    if (approximation := stored_approximation(out)) is not None:
        result.approximation = approximation.points
    return result


def _trials(out: Path, plan: Plan, stored: dict[TrialName, Stored | None]) -> list[Trial]:
    trials = {
        name: Trial(mechanism=name.label, seed=name.seed) if found is None else found.trial
        for name, found in stored.items()
    }
    speeds = stored_decoding(out)
    for label, name in trained_runs(out, plan).items():
        if label in speeds:
            trials[name].decoded_per_second = speeds[label].tokens_per_second
    return list(trials.values())


def _pairs(out: Path, plan: Plan, stored: dict[TrialName, Stored | None], baseline: str) -> list[Paired]:
    done = {name for name, found in stored.items() if found is not None and found.trial.status == "done"}
    pairs = [(name, TrialName(baseline, name.seed)) for name in stored if name.label != baseline]
    found = [paired_trials(out, plan, ours, base) for ours, base in pairs if {ours, base} <= done]
    return [pair for pair in found if pair is not None]


def _epochs(stored: Sequence[Stored]) -> list[EpochCost]:
    """The mean over the runs of a mechanism; the peak is the highest."""
    by_label: dict[str, list[EpochCost]] = {}
    for _, epoch in stored:
        if epoch is not None:
            by_label.setdefault(epoch.mechanism, []).append(epoch)
    merged = []
    for costs in by_label.values():
        seconds = statistics.fmean(cost.seconds for cost in costs)
        peak = max((cost.peak_bytes for cost in costs if cost.peak_bytes is not None), default=None)
        setting = {**costs[0].setting, "runs": len(costs)}
        merged.append(costs[0].model_copy(update={"seconds": seconds, "peak_bytes": peak, "setting": setting}))
    return merged


def _notes(out: Path, plan: Plan, baseline: str) -> list[str]:
    """What people should know besides the numbers."""
    notes = [f"{remark}." for variant in plan.variants for remark in variant.remarks]
    for label, speed in stored_decoding(out).items():
        if speed.reason is not None:
            notes.append(f"Decoding speed of {label} was not measured: {speed.reason}")
    approximation = stored_approximation(out)
    if approximation is None:
        return notes
    if approximation.reason is not None:
        return [*notes, f"The distance from exact attention was not measured: {approximation.reason}"]
    reasons: dict[str, list[str]] = {}
    for variant in plan.variants:
        known = variant.mixer in available()
        reason = not_comparable_reason(variant.mixer) if known else "its layers differ"
        if reason is not None and variant.label != baseline:
            reasons.setdefault(reason, []).append(variant.label)
    for reason, labels in reasons.items():
        notes.append(f"No distance from exact attention for {join_words(labels)}: {reason}.")
    if approximation.points and not any(point.source == "trained" for point in approximation.points):
        notes.append("The distance from exact attention is known for random activations only.")
    return notes
