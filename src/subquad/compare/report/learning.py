"""How far a mechanism has learned: nothing, less than a linear model would, or not yet all that it could."""

import math
import statistics
from collections.abc import Iterable, Sequence

from subquad.compare.records import Trial
from subquad.compare.report.quality import quality
from subquad.compare.report.result import Metric, Result
from subquad.compare.report.section import ReferenceLine
from subquad.tasks.base import Floor

LEAST_VALIDATIONS = 5
"""Fewer do not tell a trend from noise."""
LAST_PART = 0.25
"""The share of the updates that counts as the end of training."""
LEAST_GAIN = 0.01
"""The share of the loss below which a gain is not worth training on for, however sure it is."""
NOISES = 2.0
"""How many standard deviations of a validation's noise a gain must exceed."""


def still_improving(trial: Trial) -> bool | None:
    """Whether the validation loss still fell at the end of a training, so that a longer one would reach less.

    The lowest loss of the last quarter of the updates must be below the lowest one before by more than two standard
    deviations of the noise between neighbouring validations, and by more than 1 % of the loss. None is returned where
    there are fewer than five validations, or none in one of the two parts.
    """
    points = [(point.update, point.loss) for point in trial.curve if point.loss is not None]
    if len(points) < LEAST_VALIDATIONS:
        return None
    end = (1 - LAST_PART) * points[-1][0]
    before, last = [loss for at, loss in points if at <= end], [loss for at, loss in points if at > end]
    if not before or not last:
        return None
    gain = min(before) - min(last)
    noise = validation_noise([loss for _, loss in points])
    return gain > max(NOISES * noise, LEAST_GAIN * abs(min(last)))


def validation_noise(losses: Sequence[float]) -> float:
    """The standard deviation of a validation around a smooth curve, estimated from the second half of the losses.

    A second difference l[i] - 2 l[i + 1] + l[i + 2] of independent noise has 6 times its variance, and that of a smooth
    curve is small. The median of their sizes does not mind single jumps: of normal numbers it is 0.6745 deviations.
    """
    half = losses[min(len(losses) // 2, len(losses) - 3) :]
    second = [abs(a - 2 * b + c) for a, b, c in zip(half, half[1:], half[2:], strict=False)]
    return statistics.median(second) / (0.6745 * math.sqrt(6))


def learned_nothing(result: Result, label: str) -> Floor | None:
    """The trivial floor that a mechanism does not clearly pass, or None if it passes all, or if nothing is known.

    The score of a mechanism is the mean over its trials of the worse end of the interval that resampling the test
    samples gave, since a model that guesses is above a floor by luck in every second test. Where several floors are not
    passed, the one that is hardest to pass is returned.
    """
    ends = [_worse_end(trial, result.metric) for trial in result.trials_of(label)]
    known = [end for end in ends if end is not None]
    return _hardest_not_passed(result, "trivial", statistics.fmean(known)) if known else None


def below_linear(result: Result, label: str) -> Floor | None:
    """The floor of a model without hidden layers that the mean score of a mechanism is worse than.

    It is None if the mechanism is at least as good as all of them, or if nothing is known.
    """
    name = result.metric.name
    known = [trial.scores[name].value for trial in result.trials_of(label) if name in trial.scores]
    return _hardest_not_passed(result, "linear", statistics.fmean(known)) if known else None


def best_floor(floors: Iterable[Floor], metric: Metric) -> Floor | None:
    """The floor that is hardest to pass, or None if there is none."""
    return max(floors, key=lambda floor: _quality(floor.value, metric), default=None)


def _hardest_not_passed(result: Result, kind: str, score: float) -> Floor | None:
    metric = result.metric
    best = best_floor((floor for floor in result.floors if floor.kind == kind), metric)
    if best is None:
        return None
    ours, theirs = _quality(score, metric), _quality(best.value, metric)
    is_passed = ours > theirs if kind == "trivial" else ours >= theirs
    return None if is_passed else best


def _worse_end(trial: Trial, metric: Metric) -> float | None:
    score = trial.scores.get(metric.name)
    if score is None:
        return None
    end = score.low if metric.better == "higher" else score.high
    return score.value if end is None else end


def _quality(value: float, metric: Metric) -> float:
    """The value as a number of which more is better."""
    return value if metric.better == "higher" else -value


def floor_lines(result: Result) -> list[ReferenceLine]:
    """What simple models and a model without mixing reach."""
    trained = [mechanism.label for mechanism in result.mechanisms if mechanism.floor]
    means = {label: estimate.mean for label in trained if (estimate := quality(result, label)) is not None}
    return [
        *(ReferenceLine(floor.name, floor.value) for floor in result.floors),
        *(ReferenceLine(*item) for item in means.items()),
    ]
