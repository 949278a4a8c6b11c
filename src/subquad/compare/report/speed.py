"""The speed of mechanisms in a result: ratios to the baseline at one length, and from which length on one is faster."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from subquad.compare.measure.costs import Pass
from subquad.compare.measure.decoding import DecodingPoint
from subquad.compare.measure.lengths import LengthPoint, Part, Timing
from subquad.compare.report.result import Result
from subquad.compare.statistics.times import SpeedRatio, speed_ratio


def shown_part(result: Result) -> Part:
    """The part of the model whose costs are stated: the whole model if it was measured."""
    return "full" if any(point.part == "full" for point in result.points(LengthPoint)) else "encoder"


def task_length(result: Result) -> int | None:
    """The length at which quality and cost are joined: the median of the task's own samples, if costs were measured."""
    measured = {point.length for point in result.points(LengthPoint) if point.status == "done"}
    return next((length for length in result.task_lengths if length in measured), None)


def timing(point: LengthPoint | None, kind: Pass) -> Timing | None:
    return None if point is None or point.status != "done" else getattr(point, kind)


def ratios_at(result: Result, part: Part, length: int, kind: Pass) -> dict[str, SpeedRatio]:
    """How many times as fast as the baseline each mechanism is at one length, timed in the same rounds."""
    base = result.lengths_of(result.baseline, part).get(length)
    others = {label: result.lengths_of(label, part).get(length) for label in result.competitors}
    others.pop(result.baseline, None)
    timed = {label: point for label, point in others.items() if timing(point, kind) is not None}
    found = {label: _ratio(point, base, kind, len(timed)) for label, point in timed.items()}
    return {label: ratio for label, ratio in found.items() if ratio is not None}


def _ratio(ours: LengthPoint | None, base: LengthPoint | None, kind: Pass, comparisons: int) -> SpeedRatio | None:
    own, theirs = timing(ours, kind), timing(base, kind)
    if ours is None or base is None or own is None or theirs is None or ours.batch != base.batch:
        return None
    if not own.rounds or len(own.rounds) != len(theirs.rounds):  # they were not measured side by side
        return None
    return speed_ratio(own.rounds, theirs.rounds, comparisons)


def failed_controls(result: Result) -> dict[int, SpeedRatio]:
    """The lengths at which a second copy of the baseline did not come out as fast as the first in training."""
    part, failed = shown_part(result), {}
    base = result.lengths_of(result.baseline, part)
    for point in result.points(LengthPoint):
        if point.control and point.part == part and point.length in base:
            ratio = _ratio(point, base[point.length], "training", 1)
            if ratio is not None and (ratio.is_faster or ratio.is_slower):
                failed[point.length] = ratio
    return failed


def lengths_timed(result: Result, part: Part) -> list[int]:
    """The lengths at which the baseline has a time, in ascending order."""
    base = result.lengths_of(result.baseline, part)
    return [length for length, point in base.items() if timing(point, "training") is not None]


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

    A length counts as won when the mechanism is faster beyond doubt. Nothing is said about lengths that were not
    measured.
    """
    found = {length: ratios_at(result, part, length, kind).get(label) for length in lengths_timed(result, part)}
    ratios = {length: ratio for length, ratio in found.items() if ratio is not None}
    if len(ratios) < 2:
        return None
    lengths = list(ratios)
    first, last = lengths[0], lengths[-1]
    if all(ratio.is_faster for ratio in ratios.values()):
        return Crossover("always", first, last)
    if not ratios[last].is_faster:
        return Crossover("never", first, last)
    before = max(i for i, length in enumerate(lengths) if not ratios[length].is_faster)
    return Crossover("at", first, last, _interpolate(ratios, lengths[before], lengths[before + 1]))


def _interpolate(ratios: Mapping[int, SpeedRatio], below: int, above: int) -> int:
    """Where the ratio passes 1; if it was above 1 without being sure, the length at which it is sure."""
    slower, faster = ratios[below].ratio, ratios[above].ratio
    if slower >= 1:
        return above
    share = -math.log(slower) / (math.log(faster) - math.log(slower))
    return round(below ** (1 - share) * above**share)


def decoding_speed(result: Result, label: str) -> float | None:
    """Tokens that a trained model with the mechanism writes a second."""
    return next((point.tokens_per_second for point in result.points(DecodingPoint) if point.mechanism == label), None)
