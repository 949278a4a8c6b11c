"""Numbers that follow from a result: means over seeds, differences and their significance, crossovers, Pareto sets."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from subquad.compare.measure.costs import Pass
from subquad.compare.measure.decoding import DecodingPoint
from subquad.compare.measure.lengths import LengthPoint, Part, Timing
from subquad.compare.report.result import Result

CONFIDENCE = 0.95
SIGNIFICANT = 1 - CONFIDENCE
PARAMETER_TOLERANCE = 0.01
"""Models whose numbers of parameters differ by less than this share count as matched."""

# ---------------------------------------------------------------------- Student's t


def t_probability(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's distribution with a whole number of degrees of freedom.

    With theta = atan(t / sqrt(freedom)), a finite sum (A: over odd, B: over even powers of cos theta):

        odd     (theta + sin theta * A) * 2 / pi,    A = cos + 2/3 cos^3 + (2*4)/(3*5) cos^5 + ...   (freedom > 1)
        even    sin theta * B,                       B = 1 + 1/2 cos^2 + (1*3)/(2*4) cos^4 + ...
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return (theta + sine * total) * 2 / math.pi if odd else sine * total


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence, by bisection."""
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


# ---------------------------------------------------------------------- quality


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. interval: "seeds" (Student's t), "samples" (bootstrap of the only run) or "none"."""

    mean: float
    low: float | None
    high: float | None
    seeds: int
    interval: Literal["seeds", "samples", "none"]


@dataclass(frozen=True)
class Difference:
    """Mechanism minus baseline. p: for no difference at all, corrected for the number of mechanisms compared."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    interval: Literal["seeds", "samples"]

    @property
    def significant(self) -> bool:
        return self.p < SIGNIFICANT

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval, which is not corrected, leaves out 0."""
        return self.low > 0 or self.high < 0


def quality(result: Result, label: str) -> Estimate | None:
    """The metric of a mechanism. Several seeds: the t-interval of their mean; one: its run's bootstrap interval."""
    scores = [
        trial.scores[result.metric.name] for trial in result.trials_of(label) if result.metric.name in trial.scores
    ]
    if not scores:
        return None
    values = [score.value for score in scores]
    if len(values) > 1:
        half = _half_width(values)
        mean = statistics.fmean(values)
        return Estimate(mean, mean - half, mean + half, len(values), "seeds")
    (score,) = scores
    known = score.low is not None and score.high is not None
    return Estimate(score.value, score.low, score.high, 1, "samples" if known else "none")


def differences(result: Result) -> dict[str, Difference]:
    """Every mechanism against the baseline, where both have a run of the same seed; p by Holm's correction."""
    found = {label: _difference(result, label) for label in result.labels if label != result.baseline}
    known = {label: difference for label, difference in found.items() if difference is not None}
    corrected = holm({label: difference.p for label, difference in known.items()})
    return {
        label: Difference(item.mean, item.low, item.high, corrected[label], item.seeds, item.interval)
        for label, item in known.items()
    }


def _difference(result: Result, label: str) -> Difference | None:
    """Seeds are pairs: both runs of a seed saw the same data in the same order."""
    name = result.metric.name
    by_seed = {
        trial.seed: trial.scores[name].value for trial in result.trials_of(result.baseline) if name in trial.scores
    }
    ours = {trial.seed: trial.scores[name].value for trial in result.trials_of(label) if name in trial.scores}
    values = [value - by_seed[seed] for seed, value in ours.items() if seed in by_seed]
    if len(values) > 1:
        half, mean = _half_width(values), statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values))
        p = 1 - t_probability(abs(mean) / error, len(values) - 1) if error else float(mean == 0)
        return Difference(mean, mean - half, mean + half, p, len(values), "seeds")
    seeds = ours.keys() & by_seed.keys()
    measured = [item for item in result.paired if item.mechanism == label and item.seed in seeds]
    if not measured:
        return None
    (pair,) = measured
    return Difference(pair.difference, pair.low, pair.high, pair.p_value, 1, "samples")


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the chance of one false claim among all of them stays below the level."""
    corrected, running = {}, 0.0
    for rank, (label, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        running = max(running, min(1.0, p * (len(p_values) - rank)))
        corrected[label] = running
    return corrected


def _half_width(values: Sequence[float]) -> float:
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


TrialNumber = Literal["parameters", "training_seconds", "tokens_per_second", "peak_bytes"]


def trial_mean(result: Result, label: str, field: TrialNumber) -> float | None:
    """Mean over the finished runs that know the number."""
    values = [value for trial in result.trials_of(label) if (value := getattr(trial, field)) is not None]
    return statistics.fmean(values) if values else None


def decoding_speed(result: Result, label: str) -> float | None:
    """Tokens that a trained model with the mechanism writes a second."""
    return next((point.tokens_per_second for point in result.points(DecodingPoint) if point.mechanism == label), None)


# ---------------------------------------------------------------------- cost by length


@dataclass(frozen=True)
class SpeedRatio:
    """How many times faster than the baseline (below 1: slower). clear: the quartiles of the times do not overlap."""

    length: int
    faster: float
    clear: bool


def speed_ratio(point: LengthPoint | None, other: LengthPoint | None, kind: Pass) -> SpeedRatio | None:
    """Of `point` against `other`, which is the baseline at the same length; None unless both were timed."""
    ours, theirs = timing(point, kind), timing(other, kind)
    if point is None or ours is None or theirs is None:
        return None
    return SpeedRatio(point.length, theirs.median / ours.median, ours.high < theirs.low or theirs.high < ours.low)


def timing(point: LengthPoint | None, kind: Pass) -> Timing | None:
    return None if point is None or point.status != "done" else getattr(point, kind)


def speed_ratios(result: Result, label: str, part: Part, kind: Pass) -> list[SpeedRatio]:
    """At every length at which the mechanism and the baseline were timed in the same batch."""
    base = result.lengths_of(result.baseline, part)
    points = result.lengths_of(label, part).values()
    pairs = [(point, base[point.length]) for point in points if point.length in base]
    found = [speed_ratio(ours, theirs, kind) for ours, theirs in pairs if ours.batch == theirs.batch]
    return [ratio for ratio in found if ratio is not None]


@dataclass(frozen=True)
class Crossover:
    """From which length on a mechanism is faster than the baseline; first and last are measured lengths.

    kind    "always": at every measured length; "never": not at the longest; "at": from about `length` on, up to `last`
    """

    kind: Literal["always", "never", "at"]
    first: int
    last: int
    length: int | None = None


def crossover(result: Result, label: str, part: Part, kind: Pass) -> Crossover | None:
    """None without two common lengths. The logarithm of the ratio is interpolated in the logarithm of the length.

    A length counts as won when the times are clearly apart. Nothing is said about lengths outside the measured ones.
    """
    ratios = speed_ratios(result, label, part, kind)
    if len(ratios) < 2:
        return None
    first, last = ratios[0].length, ratios[-1].length
    won = [ratio.clear and ratio.faster > 1 for ratio in ratios]
    if all(won):
        return Crossover("always", first, last)
    if not won[-1]:
        return Crossover("never", first, last)
    before = max(i for i, is_won in enumerate(won) if not is_won)
    below, above = ratios[before], ratios[before + 1]
    if below.faster >= 1:  # ahead, but within the noise: only the next length shows it clearly
        return Crossover("at", first, last, above.length)
    share = -math.log(below.faster) / (math.log(above.faster) - math.log(below.faster))
    length = below.length ** (1 - share) * above.length**share
    return Crossover("at", first, last, round(length))


# ---------------------------------------------------------------------- where costs are stated


def shown_part(result: Result) -> Part:
    """The part of the model whose costs are stated: the whole model if it was measured."""
    return "full" if any(point.part == "full" for point in result.points(LengthPoint)) else "encoder"


def shown_length(result: Result, part: Part) -> int | None:
    """The measured length nearest to the one asked for, or the longest, of those at which the baseline has a time."""
    others = [label for label in result.labels if label != result.baseline]
    common = {ratio.length for label in others for ratio in speed_ratios(result, label, part, "training")}
    if not common:
        return None
    wanted = result.focus_length
    return max(common) if wanted is None else min(common, key=lambda length: (abs(length - wanted), length))


def ratios_at(result: Result, part: Part, length: int, kind: Pass) -> dict[str, SpeedRatio]:
    """Speed of every other mechanism against the baseline at one length."""
    others = [label for label in result.labels if label != result.baseline]
    found = {label: speed_ratios(result, label, part, kind) for label in others}
    return {label: ratio for label, ratios in found.items() for ratio in ratios if ratio.length == length}


# ---------------------------------------------------------------------- Pareto sets and parameters


def pareto(points: Mapping[str, tuple[float, float]], better: Literal["higher", "lower"]) -> list[str]:
    """Labels of the (cost, quality) that no other point beats in one without losing in the other; cheapest first."""
    sign = 1 if better == "higher" else -1
    gains = {label: (-cost, sign * value) for label, (cost, value) in points.items()}
    beaten = {
        label
        for label, (saving, value) in gains.items()
        if any(s >= saving and v >= value and (s, v) != (saving, value) for s, v in gains.values())
    }
    return sorted(points.keys() - beaten, key=lambda label: points[label])


def parameters(result: Result, label: str) -> int | None:
    return next((trial.parameters for trial in result.trials_of(label) if trial.parameters is not None), None)


def parameter_mismatch(result: Result) -> dict[str, float]:
    """Relative difference to the baseline, of the mechanisms whose models are not matched to it."""
    base = parameters(result, result.baseline)
    if not base:
        return {}
    counts = {label: parameters(result, label) for label in result.labels}
    shares = {label: count / base - 1 for label, count in counts.items() if count is not None}
    return {label: share for label, share in shares.items() if abs(share) > PARAMETER_TOLERANCE}


def same_data_order(result: Result) -> bool | None:
    """Whether all runs of a seed saw the same batches in the same order; None where a run does not say."""
    done = [trial for trial in result.trials if trial.status == "done"]
    if not done or any(trial.data_order is None for trial in done):
        return None
    orders: dict[int, set[str | None]] = {}
    for trial in done:
        orders.setdefault(trial.seed, set()).add(trial.data_order)
    return all(len(found) == 1 for found in orders.values())
