"""Costs by length, decoding speed and distance from exact attention: measured by child processes, kept in files.

    OUT/lengths/full-1024.json      all mechanisms at one length, measured side by side
    OUT/decoding.json
    OUT/approximation.json

What is in a file is not measured again. A mechanism that joins later makes the lengths be measured anew, since times
can be compared only where they were taken side by side.
"""

import os
from pathlib import Path
from typing import NamedTuple

from subquad.compare.measure.decoding import Speed
from subquad.compare.measure.lengths import parts_of, shape_at
from subquad.compare.plan import Plan, TrialName
from subquad.compare.report.formatting import format_number
from subquad.compare.report.schema import ApproximationPoint, LengthPoint, Part
from subquad.compare.subprocesses import Log, Worker
from subquad.compare.trials import stored_trial, trial_folder
from subquad.files import read_metadata, write_json
from subquad.tasks import task_class

WORK = "subquad.compare.measure.worker"
FORMAT = "subquad-measurement-1"
LOG, DECODING, APPROXIMATION = "measurements.log", "decoding.json", "approximation.json"


def length_steps(plan: Plan) -> list[tuple[Part, int]]:
    """What is measured: short lengths first, whose times tell whether longer ones can be afforded."""
    lengths = sorted({shape_at(plan, length).length for length in plan.lengths})
    return [(part, length) for part in parts_of(plan) for length in lengths] if lengths else []


def stored_lengths(out: Path, plan: Plan, part: Part, length: int) -> list[LengthPoint] | None:
    """The points of all mechanisms at a length; None if one is missing."""
    path = _length_path(out, part, length)
    if not path.exists():
        return None
    content = read_metadata(path, FORMAT, "measurement")
    points = [LengthPoint.model_validate(point) for point in content["points"]]
    return points if {point.mechanism for point in points} >= set(plan.labels) else None


def worker_of(out: Path) -> Worker:
    """The process that measures."""
    return Worker(WORK, [str(out)], out / LOG)


def run_length(
    worker: Worker, out: Path, plan: Plan, step: tuple[Part, int], seconds: float, say: Log
) -> list[LengthPoint]:
    """Measures one length. seconds: a mechanism whose training pass took longer at a shorter one is not tried."""
    part, length = step
    batch = shape_at(plan, length).batch
    labels, points = list(plan.labels), []
    for label, reason in _too_slow(out, plan, part, length, seconds).items():
        labels.remove(label)
        refused = LengthPoint(mechanism=label, part=part, length=length, batch=batch, status="refused", reason=reason)
        points.append(refused)
    while labels:
        answer = worker.ask({"kind": "length", "part": part, "length": length, "labels": labels}, say)
        if answer.error is None:
            points += [LengthPoint.model_validate(point) for point in answer.found]
            break
        guilty = [answer.last] if answer.last in labels else list(labels)  # while all were timed: it may be any
        for label in guilty:
            labels.remove(label)
            failed = LengthPoint(mechanism=label, part=part, length=length, batch=batch, status="failed")
            failed.reason = answer.error
            points.append(failed)
    order = {label: place for place, label in enumerate(plan.labels)}
    points.sort(key=lambda point: order[point.mechanism])
    path = _length_path(out, part, length)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "points": [point.model_dump(mode="json") for point in points]})
    return points


def _length_path(out: Path, part: Part, length: int) -> Path:
    return out / "lengths" / f"{part}-{length}.json"


def _too_slow(out: Path, plan: Plan, part: Part, length: int, seconds: float) -> dict[str, str]:
    """Mechanisms that are not tried at a length, since they failed or took too long at a shorter one."""
    reasons: dict[str, str] = {}
    for other_part, shorter in length_steps(plan):
        if other_part != part or shorter >= length:
            continue
        for point in stored_lengths(out, plan, part, shorter) or ():
            if point.status != "done":
                reasons.setdefault(point.mechanism, str(point.reason))
            elif point.training is not None and point.training.median > 1000 * seconds:
                took = f"a training pass took {point.training.median / 1000:.1f} s at {format_number(shorter)} tokens"
                reasons.setdefault(point.mechanism, f"over the time limit: {took}, the limit is {seconds:g} s")
    return reasons


# ---------------------------------------------------------------------- decoding and approximation


def trained_runs(out: Path, plan: Plan) -> dict[str, TrialName]:
    """The first finished trial of every mechanism."""
    found: dict[str, TrialName] = {}
    for name in plan.trials():
        stored = stored_trial(out, plan, name)
        if stored is not None and stored.trial.status == "done":
            found.setdefault(name.label, name)
    return found


def stored_decoding(out: Path) -> dict[str, Speed]:
    path = out / DECODING
    if not path.exists():
        return {}
    content = read_metadata(path, FORMAT, "measurement")
    return {label: Speed(*values) for label, values in content["speeds"].items()}


def decoding_is_current(out: Path, plan: Plan) -> bool:
    """Whether every mechanism with a finished trial was measured, where models of the task write text."""
    if not task_class(plan.recipe["task"]).decodes:
        return True
    return stored_decoding(out).keys() >= trained_runs(out, plan).keys()


def run_decoding(worker: Worker, out: Path, plan: Plan, say: Log) -> None:
    """Measures all mechanisms that have a finished trial, side by side."""
    runs = {label: str(_run(out, plan, name)) for label, name in trained_runs(out, plan).items()}
    answer = worker.ask({"kind": "decoding", "runs": runs}, say)
    speeds = answer.found if answer.error is None else {label: [None, answer.error] for label in runs}
    write_json(out / DECODING, {"format": FORMAT, "speeds": speeds})


def _run(out: Path, plan: Plan, name: TrialName) -> Path:
    return plan.run_of(name) or trial_folder(out, plan, name)


class Approximation(NamedTuple):
    """labels: the mechanisms of the plan then; run: the trained baseline; reason: why there are no points."""

    labels: list[str]
    run: str | None
    points: list[ApproximationPoint]
    reason: str | None


def stored_approximation(out: Path) -> Approximation | None:
    path = out / APPROXIMATION
    if not path.exists():
        return None
    content = read_metadata(path, FORMAT, "measurement")
    points = [ApproximationPoint.model_validate(point) for point in content["points"]]
    return Approximation(content["labels"], content["run"], points, content["reason"])


def approximation_is_current(out: Path, plan: Plan, baseline: str) -> bool:
    stored = stored_approximation(out)
    return stored is not None and (stored.labels, stored.run) == (plan.labels, _baseline_run(out, plan, baseline))


def run_approximation(worker: Worker, out: Path, plan: Plan, baseline: str, say: Log) -> None:
    run = _baseline_run(out, plan, baseline)
    answer = worker.ask({"kind": "approximation", "run": run and str(out / run)}, say)
    content = {"labels": plan.labels, "run": run, "points": answer.found or [], "reason": answer.error}
    write_json(out / APPROXIMATION, {"format": FORMAT, **content})


def _baseline_run(out: Path, plan: Plan, baseline: str) -> str | None:
    """Relative to the comparison, so that its folder can move."""
    name = trained_runs(out, plan).get(baseline)
    return None if name is None else os.path.relpath(_run(out, plan, name), out)
