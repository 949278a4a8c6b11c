"""Which mechanism to take at one length: the cheapest whose quality there is within the margin of the baseline's or
better. Where that is not decided, nothing is said.
"""

from typing import Literal

from subquad.compare.report.conclusions import no_learning, replacements
from subquad.compare.report.quality import verdicts
from subquad.compare.report.result import Result
from subquad.compare.report.speed import failed_controls, ratios_at, shown_part, task_length
from subquad.compare.statistics.times import TOLERANCE

Criterion = Literal["time", "memory"]
CRITERIA: tuple[Criterion, ...] = ("time", "memory")


def decide(result: Result, criterion: Criterion) -> str | None:
    """The label of the mechanism; None: it is undecided, or nothing was learned, or costs were not measured."""
    said = verdicts(result)
    if not said or set(said.values()) == {"one seed"} or no_learning(result) is not None:
        return None
    savings = _savings(result, criterion)
    if savings is None:
        return None
    sound = replacements(result)
    cheaper = {label: saving for label in sound if (saving := savings.get(label)) is not None and saving > 1}
    if cheaper:
        return max(cheaper, key=lambda label: cheaper[label])
    is_open = [label for label in said if said[label] == "undecided" or label in sound]
    if any(savings.get(label) is None or (savings[label] or 0) > 1 for label in is_open):
        return None
    return result.baseline


def _savings(result: Result, criterion: Criterion) -> dict[str, float | None] | None:
    """How many times less each mechanism costs than the baseline: 1 if it does not, None if that is not decided."""
    length, part = task_length(result), shown_part(result)
    if length is None or length in failed_controls(result):
        return None
    if criterion == "time":
        ratios = ratios_at(result, part, length, "training")
        return {
            label: one.ratio if one.is_faster else 1.0 if one.is_slower or one.is_equal else None
            for label, one in ratios.items()
        }
    points = {label: result.lengths_of(label, part).get(length) for label in result.competitors}
    sizes = {label: point.training_bytes for label, point in points.items() if point is not None}
    base = sizes.pop(result.baseline, None)
    if base is None:
        return None
    saved = {label: None if size is None else base / size for label, size in sizes.items()}
    return {label: ratio if ratio is None or ratio > TOLERANCE else 1.0 for label, ratio in saved.items()}
