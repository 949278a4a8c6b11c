"""Measured steps in files: OUT/measurements/STEP.json, such as lengths-full-1024.json or decoding.json.

A step is measured again only if the mechanisms or the inputs of the measurement have changed. Of a step with several
mechanisms all are measured again when one joins, since times can be compared only if they were taken side by side.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.compare.measure.base import Context, Measurement, Step
from subquad.compare.records import Point
from subquad.compare.subprocesses import Log, WorkerProcess
from subquad.files import read_metadata, write_json

WORKER = "subquad.compare.measure.worker"
FORMAT = "subquad-measurement-1"
LOG = "measurements.log"


def start_worker(out: Path) -> WorkerProcess:
    """The process that measures; it starts with the first request."""
    return WorkerProcess(WORKER, [str(out)], out / LOG)


def open_steps(measurement: Measurement, context: Context) -> list[Step]:
    """The steps that are not measured yet, or whose mechanisms or inputs have changed since."""
    if not measurement.labels(context):
        return []
    return [step for step in measurement.steps(context.plan) if not _is_current(measurement, context, step)]


def run_step(worker: WorkerProcess, measurement: Measurement, context: Context, step: Step, log: Log) -> list[Point]:
    """Measures a step and stores its points. A mechanism that ends the measuring process is left out of the rest."""
    labels, inputs = measurement.labels(context), measurement.inputs(context)
    points = list(measurement.refused(context, step))
    remaining = [label for label in labels if label not in {point.mechanism for point in points}]
    while remaining:
        arguments = {**step.arguments, **inputs}
        answer = worker.ask({"measurement": measurement.name, "labels": remaining, "arguments": arguments}, log)
        if answer.error is None:
            points += [measurement.point.model_validate(point) for point in answer.result]
            break
        # while all were measured side by side, it may have been any of them
        culprits = [answer.last_step] if answer.last_step in remaining else list(remaining)
        points += [measurement.failed(context.plan, step, label, answer.error) for label in culprits]
        remaining = [label for label in remaining if label not in culprits]
    points.sort(key=lambda point: labels.index(point.mechanism))
    path = _path(context.out, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"labels": labels, "inputs": inputs, "points": [point.model_dump(mode="json") for point in points]}
    write_json(path, {"format": FORMAT, **content})
    return points


def stored_points(measurement: Measurement, context: Context, steps: Sequence[Step] | None = None) -> list[Point]:
    """The points of all stored steps, or of these."""
    steps = measurement.steps(context.plan) if steps is None else steps
    contents = [_read(context, step) for step in steps if _path(context.out, step).exists()]
    return [measurement.point.model_validate(point) for content in contents for point in content["points"]]


def _is_current(measurement: Measurement, context: Context, step: Step) -> bool:
    if not _path(context.out, step).exists():
        return False
    content = _read(context, step)
    return (content["labels"], content["inputs"]) == (measurement.labels(context), measurement.inputs(context))


def _read(context: Context, step: Step) -> dict[str, Any]:
    return read_metadata(_path(context.out, step), FORMAT, "measurement")


def _path(out: Path, step: Step) -> Path:
    return out / "measurements" / f"{step.name}.json"
