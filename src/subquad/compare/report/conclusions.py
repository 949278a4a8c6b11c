"""The conclusions in words, made from the numbers and never beyond what they show.

A difference in quality is claimed where it is significant, a difference in time where the quartiles of the repeats do
not overlap; everything else is called undecided, with its interval. One seed says nothing about mechanisms, only about
the runs that were made with it. Costs are stated at one measured length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from subquad.compare.measure.costs import PASSES
from subquad.compare.measure.decoding import DecodingPoint
from subquad.compare.measure.lengths import PART_TITLES, LengthPoint, Part
from subquad.compare.measure.swap import SwapPoint
from subquad.compare.report.formatting import (
    format_bytes,
    format_evidence,
    format_metric,
    format_number,
    format_p,
    format_ratio,
    format_seeds,
    join_words,
)
from subquad.compare.report.result import Metric, Result
from subquad.compare.report.statistics import (
    Difference,
    SpeedRatio,
    crossover,
    differences,
    parameter_mismatch,
    quality,
    ratios_at,
    same_data_order,
    shown_length,
    shown_part,
)


@dataclass(frozen=True)
class Finding:
    """One statement, and the numbers it rests on where they are not in it. The first one is the headline."""

    kind: Literal["headline", "quality", "cost", "caveat"]
    text: str
    detail: str = ""


def conclude(result: Result) -> list[Finding]:
    """The headline, what was found about quality and cost, and what limits it."""
    learned = _nothing_learned(result) is None
    quality = [Finding("quality", text) for text in _quality(result)] if learned else []
    costs = [Finding("cost", text) for text in _costs(result)]
    return [headline(result), *quality, *costs, *(Finding("caveat", text) for text in _caveats(result))]


# ---------------------------------------------------------------------- headline


def headline(result: Result) -> Finding:
    """The fastest mechanism without a sign of being worse; failing that, the smallest loss; failing that, facts.

    Models that have learned nothing do not differ by their mechanisms: then it says this and no more.
    """
    if (text := _nothing_learned(result)) is not None:
        return Finding("headline", text)
    part = shown_part(result)
    length = shown_length(result, part)
    found = differences(result)
    if length is None:
        return _headline_of_quality(result, found)
    ratios = ratios_at(result, part, length, "training")
    faster = {label: ratio for label, ratio in ratios.items() if ratio.clear and ratio.faster > 1}
    if not faster:
        text = f"At {format_number(length)} tokens no mechanism trains clearly faster than {result.baseline}."
        return Finding("headline", text)
    compared = [label for label in faster if label in found]
    doubted = [label for label in compared if found[label].significant or found[label].excludes_zero]
    sound = [label for label in compared if label not in doubted or not _worse(result, found[label])]
    if sound or not compared:
        label = max(sound or faster, key=lambda name: faster[name].faster)
    else:
        label = min(compared, key=lambda name: abs(found[name].mean))
    speed = format_ratio(faster[label].faster)
    gain = f"At {format_number(length)} tokens {label} trains {speed} as fast as {result.baseline}"
    if label not in found:
        return Finding("headline", f"{gain}; their {result.metric.name} was not compared.")
    return Finding("headline", gain + _clause(result, found[label], len(found)), _detail(result, found[label]))


def _nothing_learned(result: Result) -> str | None:
    metric = result.metric
    means = [found.mean for label in result.labels if (found := quality(result, label)) is not None]
    if metric.chance_level is None or not means:
        return None
    higher = metric.better == "higher"
    best = max(means) if higher else min(means)
    if best > metric.chance_level if higher else best < metric.chance_level:
        return None
    level = f"{format_metric(metric, metric.chance_level)} or {'less' if higher else 'more'}"
    return (
        f"No model has learned anything yet: the best {metric.name} is {format_metric(metric, best)}, and {level} "
        "counts as nothing learned. Train longer before comparing."
    )


def _clause(result: Result, found: Difference, comparisons: int) -> str:
    metric = result.metric
    if found.interval == "samples":
        return f"; {_in_this_run(result, found)}."
    if not found.significant and found.excludes_zero and comparisons > 1:
        return f"; its difference in {metric.name} is not significant once corrected for {comparisons} comparisons."
    if not found.significant:
        return f", with no significant difference in {metric.name}."
    word = "worse" if _worse(result, found) else "better"
    return f" and is {word} by {format_metric(metric, abs(found.mean))} {metric.name}."


def _in_this_run(result: Result, found: Difference) -> str:
    metric = result.metric
    word = "higher" if found.mean > 0 else "lower"
    return f"in this run, with one seed, its {metric.name} is {format_metric(metric, abs(found.mean))} {word}"


def _detail(result: Result, found: Difference) -> str:
    shown = format_metric(result.metric, found.mean, sign=True)
    return f"Difference {shown} {result.metric.name}, {format_evidence(result.metric, found)}."


def _headline_of_quality(result: Result, found: dict[str, Difference]) -> Finding:
    name, base = result.metric.name, result.baseline
    if not found:
        return Finding("headline", f"Nothing can be concluded yet: no mechanism was compared with {base}.")
    if all(item.interval == "samples" for item in found.values()):
        label = (max if result.metric.better == "higher" else min)(found, key=lambda one: found[one].mean)
        text = f"One seed says nothing about mechanisms. Of those compared with {base}, {label} came out best: "
        return Finding("headline", f"{text}{_in_this_run(result, found[label])}.", _detail(result, found[label]))
    better = [label for label, item in found.items() if _is_claimed(item) and not _worse(result, item)]
    if not better:
        text = f"No mechanism is significantly better than {base} in {name}; costs by length were not measured."
        return Finding("headline", text)
    label = max(better, key=lambda item: abs(found[item].mean))
    text = f"{label} is better than {base} by {format_metric(result.metric, abs(found[label].mean))} {name}."
    return Finding("headline", text, _detail(result, found[label]))


def _is_claimed(found: Difference) -> bool:
    """Whether seeds show a difference between mechanisms; samples of one run show one between two runs."""
    return found.significant and found.interval == "seeds"


def _worse(result: Result, found: Difference) -> bool:
    return (found.mean < 0) == (result.metric.better == "higher")


# ---------------------------------------------------------------------- quality and cost


def _quality(result: Result) -> list[str]:
    metric, base = result.metric, quality(result, result.baseline)
    if base is None:
        return []
    found = differences(result)
    scores = [trial.scores[metric.name] for trial in result.trials_of(result.baseline) if metric.name in trial.scores]
    samples = f", {format_number(scores[0].samples)} samples" if scores[0].samples is not None else ""
    against = (
        f"{result.baseline} ({format_metric(metric, base.mean)} {metric.name}, {format_seeds(base.seeds)}{samples})"
    )
    significant = [label for label, item in found.items() if _is_claimed(item)]
    single = [label for label, item in found.items() if item.interval == "samples"]
    worse = [label for label in significant if _worse(result, found[label])]
    groups = {
        f"Significantly better than {against}": [label for label in significant if label not in worse],
        f"Significantly worse than {against}": worse,
        f"Not significantly different from {against}": [
            label for label in found if label not in significant and label not in single
        ],
        f"In this run, against {against}": single,
    }
    texts = []
    for words, labels in groups.items():
        if labels:
            order = sorted(labels, key=lambda label: -abs(found[label].mean))
            shown = [f"{label} {_amount(metric, found[label], base.seeds)}" for label in order]
            texts.append(f"{words}: {'; '.join(shown)}.")
    return texts


def _amount(metric: Metric, found: Difference, usual_seeds: int) -> str:
    """ "−0.41 (−0.80 to −0.03, p = 0.13)"."""
    low, high = (format_number(end, metric.digits, sign=True) for end in (found.low, found.high))
    extra = "" if found.seeds == usual_seeds else f", {format_seeds(found.seeds)}"
    return f"{format_metric(metric, found.mean, sign=True)} ({low} to {high}, {format_p(found.p)}{extra})"


def _costs(result: Result) -> list[str]:
    part = shown_part(result)
    length = shown_length(result, part)
    if length is None:
        return []
    where = f"at {format_number(length)} tokens ({PART_TITLES[part]}, {result.baseline} = 1)"
    texts = []
    for kind in reversed(PASSES):
        texts += _speed_text(f"{kind.capitalize()} speed {where}", ratios_at(result, part, length, kind))
    return [*texts, *_memory_text(result, part, length, where), *_crossover_text(result, part)]


def _speed_text(start: str, ratios: dict[str, SpeedRatio]) -> list[str]:
    order = sorted(ratios, key=lambda label: -ratios[label].faster)
    clear = [f"{label} {format_ratio(ratios[label].faster)}" for label in order if ratios[label].clear]
    tied = [label for label in order if not ratios[label].clear]
    parts = [join_words(clear)] if clear else []
    if tied:
        parts.append(f"no clear difference for {join_words(tied)}")
    return [f"{start}: {'; '.join(parts)}."] if parts else []


def _memory_text(result: Result, part: Part, length: int, where: str) -> list[str]:
    points = {label: result.lengths_of(label, part).get(length) for label in result.labels}
    peaks = {label: point.training_bytes for label, point in points.items() if point and point.training_bytes}
    base = peaks.pop(result.baseline, None)
    if base is None or not peaks:
        return []
    order = sorted(peaks, key=lambda label: peaks[label])
    shown = join_words([f"{label} {format_ratio(peaks[label] / base)}" for label in order])
    return [f"Peak memory of a training pass {where}: {shown} of {format_bytes(base)}."]


def _crossover_text(result: Result, part: Part) -> list[str]:
    found = {
        label: place
        for label in result.labels
        if label != result.baseline and (place := crossover(result, label, part, "training"))
    }
    reached = sorted((place.length, label) for label, place in found.items() if place.length is not None)
    parts = [f"{label} from about {format_number(length)} tokens" for length, label in reached]
    for kind, words in (("always", "at every measured length"), ("never", "at none up to the longest")):
        spans: dict[tuple[int, int], list[str]] = {}
        for label, place in found.items():
            if place.kind == kind:
                spans.setdefault((place.first, place.last), []).append(label)
        for (first, last), labels in spans.items():
            parts.append(f"{join_words(labels)} {words} ({format_number(first)} to {format_number(last)})")
    return [f"Training is clearly faster than with {result.baseline}: {'; '.join(parts)}."] if parts else []


# ---------------------------------------------------------------------- caveats


def _caveats(result: Result) -> list[str]:
    texts = [*_trials(result), *_seeds(result), *_fairness(result), *_gaps(result), *result.notes]
    return [*texts, *_decoding_gaps(result), *_swap_gaps(result)]


def _trials(result: Result) -> list[str]:
    texts = [
        f"{trial.mechanism} (seed {trial.seed}) failed: {trial.reason}."
        for trial in result.trials
        if trial.status == "failed"
    ]
    missing = [f"{trial.mechanism} (seed {trial.seed})" for trial in result.trials if trial.status == "missing"]
    return texts + ([f"Not trained yet: {join_words(missing)}."] if missing else [])


def _seeds(result: Result) -> list[str]:
    found = differences(result)
    single = [label for label, item in found.items() if item.interval == "samples"]
    two = [label for label, item in found.items() if item.seeds == 2]
    texts = []
    if single:
        texts.append(
            f"One seed only for {join_words(single)}: intervals and p-values come from resampling the test samples, "
            "and say nothing about how much another seed would change; three or more would tell."
        )
    if two:
        texts.append(f"Two seeds only for {join_words(two)}: three or more would tell how much a seed changes.")
    if len(found) > 1:
        texts.append(f"p-values, but not intervals, are corrected for {len(found)} comparisons (Holm).")
    return texts


def _fairness(result: Result) -> list[str]:
    mismatch = parameter_mismatch(result)
    texts = []
    if mismatch:
        shown = [f"{label} {format_number(100 * share, 1, sign=True)}%" for label, share in mismatch.items()]
        texts.append(f"Parameters are not matched to those of {result.baseline}: {join_words(shown)}.")
    order = same_data_order(result)
    if order is False:
        texts.append("The order of the data differs between mechanisms: differences are not due to mixing alone.")
    elif order is None and any(trial.status == "done" for trial in result.trials):
        texts.append("Some runs do not say in which order they saw the data.")
    changed = _changed_settings([point.setting for point in result.points(LengthPoint) if point.status == "done"])
    if changed:
        texts.append(f"Costs by length were not all measured under one setting ({join_words(changed)} differ).")
    return texts


def _changed_settings(settings: Sequence[dict[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]


def _gaps(result: Result) -> list[str]:
    gaps: dict[tuple[str, str, str], set[int]] = {}
    for point in result.points(LengthPoint):
        if point.status != "done":
            gaps.setdefault((point.mechanism, point.status, point.reason or "no reason given"), set()).add(point.length)
    return [
        f"{label} has no costs at {join_words([format_number(length) for length in sorted(lengths)])} tokens "
        f"({status}: {reason})."
        for (label, status, reason), lengths in gaps.items()
    ]


def _decoding_gaps(result: Result) -> list[str]:
    return [
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
