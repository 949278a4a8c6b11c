"""From the files of a comparison to its result: what is missing or failed is in it, too."""

import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import torch

import subquad
from subquad.compare import measure
from subquad.compare.floors import stored_floors
from subquad.compare.measure.base import Context, Margin
from subquad.compare.measure.cache import stored_points
from subquad.compare.plan import Plan, TrialName
from subquad.compare.records import EpochCost, SampleCovariance, Trial
from subquad.compare.report.fairness import why_times_differ
from subquad.compare.report.result import Mechanism, Metric, Result
from subquad.compare.trials import Trials
from subquad.compare.tuning.trials import searches
from subquad.environment import environment


def assemble(context: Context, title: str, command: str) -> Result:
    """The result of everything that is in the folder of a comparison."""
    plan, trials = context.plan, context.trials
    stored = {name: trials.stored(name) for name in plan.trials()}
    records = [
        Trial(mechanism=name.label, seed=name.seed) if found is None else found.trial for name, found in stored.items()
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = {measurement.name: stored_points(measurement, context) for measurement in measure.MEASUREMENTS}
    floors, reason = stored_floors(context.out)
    no_floors = [] if reason is None else [f"Simple models of the data were not computed: {reason.rstrip('.')}."]
    result = Result(
        title=title,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        task=plan.recipe["task"],
        metric=_metric(plan, records, context.margin),
        baseline=context.baseline,
        mechanisms=[
            Mechanism(label=v.label, mixer=v.mixer, options=v.changes, floor=v.is_floor)
            for v in map(plan.variant, plan.labels)
        ],
        recipe=plan.recipe,
        environment={"subquad": subquad.__version__, **environment(device)},
        notes=[*(f"{remark}." for variant in plan.variants for remark in variant.remarks), *no_floors],
        task_lengths=list(plan.task_lengths),
        floors=floors,
        tuning=searches(context.out, plan),
        trials=records,
        covariance=_covariance(trials, records, context.baseline),
        epochs=_mean_epochs(found.epoch for found in stored.values() if found is not None),
        measurements={name: found for name, found in points.items() if found},
    )
    if (reason := why_times_differ(result)) is not None:
        result.notes.append(reason)
    return result


def _metric(plan: Plan, trials: Iterable[Trial], margin: Margin | None) -> Metric:
    """What quality means; the chance level depends on how many samples were evaluated."""
    main = plan.task.main_metric
    counts = [score.samples for trial in trials for score in trial.scores.values() if score.samples is not None]
    chance_level = plan.task.chance_level(plan.data_dependent_model_config, counts[0]) if counts else None
    margin = margin or Margin(main.margin, main.relative_margin)
    return Metric(
        name=main.title,
        better=main.better,
        unit=main.unit,
        chance_level=chance_level,
        margin=margin.value,
        relative_margin=margin.is_relative,
    )


def _covariance(trials: Trials, records: Sequence[Trial], baseline: str) -> SampleCovariance | None:
    """The baseline's trials come first: what was evaluated on other samples than theirs is not compared."""
    done = [TrialName(trial.mechanism, trial.seed) for trial in records if trial.status == "done"]
    return trials.sample_covariance(sorted(done, key=lambda name: name.label != baseline))


def _mean_epochs(epochs: Iterable[EpochCost | None]) -> list[EpochCost]:
    """The mean over the trials of a mechanism; the peak is the highest."""
    by_label: dict[str, list[EpochCost]] = {}
    for epoch in epochs:
        if epoch is not None:
            by_label.setdefault(epoch.mechanism, []).append(epoch)
    merged = []
    for costs in by_label.values():
        seconds = statistics.fmean(cost.seconds for cost in costs)
        peak = max((cost.peak_bytes for cost in costs if cost.peak_bytes is not None), default=None)
        setting = {**costs[0].setting, "runs": len(costs)}
        merged.append(costs[0].model_copy(update={"seconds": seconds, "peak_bytes": peak, "setting": setting}))
    return merged
