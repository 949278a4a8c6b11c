"""Results of several machines as one: a mechanism or a seed may have been trained on each.

What was compared must be the same: task, recipe, metric and baseline. Trials are put together; the same trial twice
must agree. Covariances between trials of different machines are unknown and taken as 0, which makes intervals of their
differences too wide rather than too narrow. Times of different machines cannot be compared: for each length, and
each other measurement, those of the first result that has them are kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.records import Point, SampleCovariance
from subquad.compare.report.result import Result, read_result
from subquad.train.run import differences


def merge_files(paths: Sequence[Path]) -> Result:
    """The results in these files as one; what does not belong together is a ValueError that names both files."""
    if len(paths) < 2:
        raise ValueError("give two results or more to merge")
    results = [read_result(path) for path in paths]
    for path, other in zip(paths[1:], results[1:], strict=True):
        if changed := _conflicts(results[0], other):
            raise ValueError(f"{paths[0]} and {path} are not of one comparison: {', '.join(changed)} differ")
    return merge(results)


def merge(results: Sequence[Result]) -> Result:
    """The results, which `_conflicts` has found to belong together."""
    first = results[0]
    mechanisms = {one.label: one for result in results for one in result.mechanisms}
    trials = {(one.mechanism, one.seed): one for result in results for one in reversed(result.trials)}
    done = {
        key: one for result in results for one in result.trials if (key := (one.mechanism, one.seed)) and one.scores
    }
    epochs = {one.mechanism: one for result in reversed(results) for one in result.epochs}
    machines = [str(result.environment.get("cpu", "unknown")) for result in results]
    note = f"Merged from {len(results)} results ({'; '.join(machines)}); times are compared within one machine only."
    merged = first.model_copy(
        update={
            "mechanisms": list(mechanisms.values()),
            "trials": [done.get(key, trial) for key, trial in trials.items()],
            "epochs": list(epochs.values()),
            "covariance": _joined_covariance(results),
            "measurements": _first_measurements(results),
            "notes": list(dict.fromkeys([note, *(text for result in results for text in result.notes)])),
        }
    )
    return Result.model_validate(merged.model_dump())


def _conflicts(first: Result, other: Result) -> list[str]:
    """What differs that must not."""
    fields = ("task", "baseline", "recipe", "metric")
    ours, theirs = (result.model_dump(mode="json", include=set(fields)) for result in (first, other))
    for values in (ours, theirs):
        values["metric"].pop("chance_level")  # it depends on how many samples were evaluated
    changed = differences(ours, theirs)
    known = {one.label: one for one in first.mechanisms}
    changed += [one.label for one in other.mechanisms if known.get(one.label, one) != one]
    scores = {(one.mechanism, one.seed): one.scores for one in first.trials if one.scores}
    return changed + [
        f"{one.mechanism} with seed {one.seed}"
        for one in other.trials
        if one.scores and scores.get((one.mechanism, one.seed), one.scores) != one.scores
    ]


def _joined_covariance(results: Sequence[Result]) -> SampleCovariance | None:
    known = [result.covariance for result in results if result.covariance is not None]
    if len(known) < len(results):
        return None
    trials = list(dict.fromkeys(key for covariance in known for key in covariance.trials))
    values = np.zeros((len(trials), len(trials)))
    for covariance in known:
        places = [trials.index(key) for key in covariance.trials]
        values[np.ix_(places, places)] = np.array(covariance.values)
    return SampleCovariance(trials=trials, values=values.tolist(), samples=min(one.samples for one in known))


def _first_measurements(results: Sequence[Result]) -> dict[str, list[Point]]:
    kept: dict[str, list[Point]] = {}
    seen: set[tuple[object, ...]] = set()
    for result in results:
        found = [(name, point, _group(name, point)) for name, points in result.measurements.items() for point in points]
        for name, point, group in found:
            if group not in seen:
                kept.setdefault(name, []).append(point)
        seen |= {group for _, _, group in found}
    return kept


def _group(name: str, point: Point) -> tuple[object, ...]:
    """What was measured side by side."""
    return (name, point.part, point.length) if isinstance(point, LengthPoint) else (name,)
