"""The conclusions in words: an answer that a person can act on, what to know before believing it, and its limits.

Quality and cost are joined at the length of the task's own samples and nowhere else. A mechanism is recommended if it
is faster there beyond doubt, and within the margin of the baseline's quality or better. One seed says nothing about
mechanisms, only about the runs that were made with it; models that learned nothing, or less than a linear model, say
nothing about mixing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from subquad.compare.measure.decoding import DecodingPoint
from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.measure.swap import SwapPoint
from subquad.compare.report.fairness import parameter_mismatch, same_data_order
from subquad.compare.report.formatting import (
    format_metric,
    format_number,
    format_ratio,
    format_share,
    format_span,
    join_words,
)
from subquad.compare.report.learning import below_linear, learned_nothing, still_improving
from subquad.compare.report.quality import differences, margin, more_seeds, quality, verdicts
from subquad.compare.report.result import Result
from subquad.compare.report.speed import crossover, failed_controls, ratios_at, shown_part, task_length
from subquad.compare.statistics.scores import Difference, Verdict
from subquad.compare.statistics.times import SpeedRatio


@dataclass(frozen=True)
class Finding:
    """A statement. The first one is the answer; then what concerns the floors, before any claim; then the limits."""

    kind: Literal["answer", "floor", "limit"]
    text: str


def conclude(result: Result) -> list[Finding]:
    floors = [Finding("floor", text) for text in _floors(result)]
    return [Finding("answer", answer(result)), *floors, *(Finding("limit", text) for text in _limits(result))]


# ---------------------------------------------------------------------- the answer


def answer(result: Result) -> str:
    """One paragraph that a person can act on."""
    said = verdicts(result)
    if (text := no_learning(result)) is not None:
        return text
    if not said:
        return f"Nothing can be concluded yet: no mechanism was compared with {result.baseline}."
    if set(said.values()) == {"one seed"}:
        return " ".join([_single_seed(result), *_longer(result)])
    return " ".join([_choice(result, said), *_longer(result)])


def no_learning(result: Result) -> str | None:
    """Why the models say nothing about mixing, if they do not: the baseline must have learned more than a floor."""
    base = quality(result, result.baseline)
    if base is None:
        return None
    metric = result.metric
    shown = f"{result.baseline} has {format_metric(metric, base.mean)} {metric.name}"
    if (floor := learned_nothing(result, result.baseline)) is not None:
        why = f"{floor.name} has {format_metric(metric, floor.value)} without learning anything"
    elif metric.chance_level is not None and not _passes(result, base.mean, metric.chance_level):
        why = f"{format_metric(metric, metric.chance_level)} counts as nothing learned"
    elif (floor := below_linear(result, result.baseline)) is not None:
        why = f"{floor.name}, a model without hidden layers, has {format_metric(metric, floor.value)}"
    else:
        return None
    return f"No answer yet: {shown}, and {why}. Train longer or tune before comparing mechanisms."


def _passes(result: Result, value: float, level: float) -> bool:
    return value > level if result.metric.better == "higher" else value < level


def _single_seed(result: Result) -> str:
    found, metric = differences(result), result.metric
    best = max if metric.better == "higher" else min
    label = best(found, key=lambda one: found[one].mean)
    shown = format_metric(metric, found[label].mean, sign=True)
    return (
        f"One seed says nothing about mechanisms; train with three or more. In this run {label} came out best of those "
        f"compared with {result.baseline}: {shown} {metric.name}."
    )


def _choice(result: Result, said: dict[str, Verdict]) -> str:
    """The mechanism to use, or why to keep the baseline."""
    length, base = task_length(result), result.baseline
    if length in failed_controls(result):
        length = None  # its times say nothing
    speeds = {} if length is None else ratios_at(result, shown_part(result), length, "training")
    sound = replacements(result)
    faster = [label for label in sound if label in speeds and speeds[label].is_faster]
    better = [label for label in sound if said[label] == "better"]
    if faster and length is not None:
        label = max(faster, key=lambda one: speeds[one].ratio)
        return f"Use {label} here: {_speed(result, speeds[label], length)}, and {_quality_words(result, label, said)}."
    if better:
        found = differences(result)
        label = max(better, key=lambda one: abs(found[one].mean))
        cost = f"; {_speed(result, speeds[label], length)}" if label in speeds and length is not None else ""
        return f"Use {label} here: {_quality_words(result, label, said)}{cost}."
    return f"Keep {base} here: {_why_baseline(result, said, speeds, length)}."


def _speed(result: Result, ratio: SpeedRatio, length: int) -> str:
    where = f"at {format_number(length)} tokens, the length of this task's samples,"
    if ratio.is_equal:
        return f"{where} it trains as fast as {result.baseline} ({format_span(ratio)})"
    if not ratio.is_decided:
        return f"{where} its speed in training is undecided ({format_span(ratio)} of {result.baseline})"
    return f"{where} it trains {format_ratio(ratio.ratio)} as fast as {result.baseline} ({format_span(ratio)})"


def _quality_words(result: Result, label: str, said: dict[str, Verdict]) -> str:
    words = f"its {result.metric.name} is {describe_verdict(result, label, differences(result)[label], said[label])}"
    mismatch = parameter_mismatch(result).get(label)
    return words if mismatch is None else f"{words}, with {format_share(mismatch)} parameters"


def describe_verdict(result: Result, label: str, found: Difference, said: Verdict) -> str:
    """The verdict on a mechanism, with its interval."""
    metric = result.metric
    low, high = (format_metric(metric, end, sign=True) for end in (found.low, found.high))
    if said == "within":
        return f"within {format_metric(metric, margin(result))} of {result.baseline} ({low} to {high})"
    if said in ("better", "worse"):
        least, most = (format_metric(metric, end) for end in sorted((abs(found.low), abs(found.high))))
        return f"{said} by {least} to {most}"
    if said == "one seed":
        return f"{format_metric(metric, found.mean, sign=True)} in this run, with one seed"
    more = more_seeds(result, label)
    decide = "it takes more test samples" if more is None else f"about {more} more seed{'s' * (more > 1)} would decide"
    return f"undecided ({low} to {high}): {decide}"


def _why_baseline(result: Result, said: dict[str, Verdict], speeds: dict[str, SpeedRatio], length: int | None) -> str:
    found = differences(result)
    if length is None:
        candidates, start = list(said), f"none of the others is better in {result.metric.name}"
    else:
        candidates = [label for label in said if label in speeds and speeds[label].is_faster]
        start = f"at {format_number(length)} tokens, the length of this task's samples, "
        start += (
            "what trains faster is no proven replacement" if candidates else "no mechanism is shown to train faster"
        )
    order = sorted(candidates, key=lambda one: found[one].mean, reverse=result.metric.better == "higher")
    shown = [f"{label} {describe_verdict(result, label, found[label], said[label])}" for label in order[:MOST_NAMED]]
    rest = len(order) - len(shown)
    return start + (f" ({'; '.join(shown)}{f'; {rest} more in the table' if rest else ''})" if shown else "")


MOST_NAMED = 3
"""How many mechanisms the answer names; the table has all of them."""


def _longer(result: Result) -> list[str]:
    """From where on the others are cheaper, without a word on quality there."""
    part, own = shown_part(result), task_length(result)
    found = {label: crossover(result, label, part, "training") for label in result.competitors}
    reached = sorted(
        (place.length, label)
        for label, place in found.items()
        if place is not None and place.length is not None and (own is None or place.length > own)
    )
    if not reached:
        return []
    shown = join_words([f"{label} from about {format_number(length)}" for length, label in reached[:MOST_NAMED]])
    return [f"On longer sequences training is cheaper with {shown} tokens on; quality was not measured there."]


# ---------------------------------------------------------------------- floors


def replacements(result: Result) -> list[str]:
    """The mechanisms whose quality is within the margin of the baseline's or better, and above all floors."""
    said = verdicts(result)
    return [
        label
        for label in said
        if said[label] in ("within", "better")
        and learned_nothing(result, label) is None
        and below_linear(result, label) is None
    ]


def _floors(result: Result) -> list[str]:
    """What is said before any claim: who learned nothing, who is below a linear model, who was not done yet."""
    metric, texts = result.metric, []
    for find, words in ((learned_nothing, "Learned nothing"), (below_linear, "Below a linear model")):
        below: dict[str, list[str]] = {}
        for label in result.competitors:
            if (floor := find(result, label)) is not None:
                below.setdefault(f"{floor.name}, {format_metric(metric, floor.value)}", []).append(label)
        texts += [f"{words} ({floor}): {join_words(labels)}." for floor, labels in below.items()]
    improving = [
        label for label in result.competitors if any(still_improving(trial) for trial in result.trials_of(label))
    ]
    if improving:
        texts.append(
            f"Still improving at the end of training: {join_words(improving)}. Longer training may change this."
        )
    return [*texts, *_no_mixing(result)]


def _no_mixing(result: Result) -> list[str]:
    """Mechanisms that are no better than a model that mixes nothing."""
    texts = []
    for floor in (mechanism.label for mechanism in result.mechanisms if mechanism.floor):
        level = quality(result, floor)
        if level is not None:
            means = {label: quality(result, label) for label in result.competitors}
            below = [
                label for label, one in means.items() if one is not None and not _passes(result, one.mean, level.mean)
            ]
            if below:
                shown = format_metric(result.metric, level.mean)
                texts.append(f"No better than a model that mixes nothing ({floor}, {shown}): {join_words(below)}.")
    return texts


# ---------------------------------------------------------------------- limits


def _limits(result: Result) -> list[str]:
    trained = [*_trials(result), *_tuning(result), *_fairness(result)]
    return [*trained, *_times(result), *_gaps(result), *_swap_gaps(result), *result.notes]


def _trials(result: Result) -> list[str]:
    texts = [
        f"{trial.mechanism} (seed {trial.seed}) failed: {trial.reason}."
        for trial in result.trials
        if trial.status == "failed"
    ]
    missing = [f"{trial.mechanism} (seed {trial.seed})" for trial in result.trials if trial.status == "missing"]
    return texts + ([f"Not trained yet: {join_words(missing)}."] if missing else [])


def _tuning(result: Result) -> list[str]:
    """Where a search ended at the edge of what it tried, or found nothing."""
    edges = [f"{search.mechanism} ({', '.join(search.edges)})" for search in result.tuning if search.edges]
    vain = [search.mechanism for search in result.tuning if not search.chosen]
    texts = []
    if edges:
        texts.append(
            f"The best settings are the last that were tried: {join_words(edges)}. More trials may find better."
        )
    if vain:
        texts.append(f"Not tuned, since no trial came to its end: {join_words(vain)}.")
    return texts


def _fairness(result: Result) -> list[str]:
    texts = []
    if mismatch := parameter_mismatch(result):
        shown = [f"{label} {format_share(share)}" for label, share in mismatch.items()]
        texts.append(f"Parameters are not matched to those of {result.baseline}: {join_words(shown)}.")
    order = same_data_order(result)
    if order is False:
        texts.append("The order of the data differs between mechanisms: differences are not due to mixing alone.")
    elif order is None and any(trial.status == "done" for trial in result.trials):
        texts.append("Some runs do not say in which order they saw the data.")
    known = set() if result.covariance is None else set(result.covariance.trials)
    done = [(trial.mechanism, trial.seed) for trial in result.trials if trial.status == "done"]
    others = [f"{label} (seed {seed})" for label, seed in done if known and (label, seed) not in known]
    if others:
        texts.append(f"Evaluated on other samples than {result.baseline}, and not compared: {join_words(others)}.")
    return texts


def _times(result: Result) -> list[str]:
    texts = [
        f"At {format_number(length)} tokens a second copy of {result.baseline} took {format_ratio(1 / ratio.ratio)} "
        f"the time of the first ({format_span(ratio)}): times there say nothing; measure again on an idle machine."
        for length, ratio in failed_controls(result).items()
    ]
    points = [point for point in result.points(LengthPoint) if point.status == "done"]
    # at the task's own lengths the batch is that of a training
    settings = [{key: value for key, value in point.setting.items() if key != "tokens"} for point in points]
    if changed := _changed_settings(settings):
        texts.append(f"Costs by length were not all measured under one setting ({join_words(changed)} differ).")
    return texts


def _changed_settings(settings: Sequence[dict[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]


def _gaps(result: Result) -> list[str]:
    gaps: dict[tuple[str, str, str], set[int]] = {}
    for point in result.points(LengthPoint):
        if point.status != "done" and not point.control:
            gaps.setdefault((point.mechanism, point.status, point.reason or "no reason given"), set()).add(point.length)
    texts = [
        f"{label} has no costs at {join_words([format_number(length) for length in sorted(lengths)])} tokens "
        f"({status}: {reason})."
        for (label, status, reason), lengths in gaps.items()
    ]
    return texts + [
        f"Decoding speed of {point.mechanism} was not measured: {point.reason}"
        for point in result.points(DecodingPoint)
        if point.status != "done"
    ]


def _swap_gaps(result: Result) -> list[str]:
    return [
        f"{point.mechanism} was not swapped into the trained baseline: {point.reason}"
        for point in result.points(SwapPoint)
        if point.status != "done"
    ]
