"""How fast trained models write: tokens a second, all mechanisms side by side on the same inputs.

What they write is their task's `decoding_workload`. Of every mechanism the first finished trial is measured.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from subquad.compare.measure.base import SIDE_BY_SIDE, Begin, Context, Measurement, Step
from subquad.compare.measure.timing import interleaved_seconds, synchronizer
from subquad.compare.plan import Plan
from subquad.compare.records import Point
from subquad.train.run import load_trained

ROUNDS = 3


class DecodingPoint(Point):
    """How fast a mechanism writes. refused: it has no streaming form."""

    tokens_per_second: float | None = Field(None, gt=0)


class Decoding(Measurement):
    """One step, for all mechanisms that have a finished trial."""

    name = "decoding"
    point: ClassVar[type[Point]] = DecodingPoint
    needs_trials = True

    def steps(self, plan: Plan) -> list[Step]:
        return [Step("decoding", "decoding speed", {})] if plan.task.decodes else []

    def labels(self, context: Context) -> list[str]:
        return list(context.trials.first_done())

    def inputs(self, context: Context) -> dict[str, Any]:
        """The runs by label, relative to the comparison, so that its folder can move."""
        trials = context.trials
        runs = {label: trials.run_folder(name) for label, name in trials.first_done().items()}
        return {"runs": {label: os.path.relpath(run, context.out) for label, run in runs.items()}}

    def measure(
        self, out: Path, plan: Plan, labels: Sequence[str], arguments: Mapping[str, Any], begin: Begin
    ) -> list[DecodingPoint]:
        runs = {label: out / arguments["runs"][label] for label in labels}
        return measure_decoding(runs, plan.split, begin)


def measure_decoding(runs: Mapping[str, Path], split: str, begin: Begin) -> list[DecodingPoint]:
    """runs: the folders of trained runs by label."""
    points = {label: DecodingPoint(mechanism=label) for label in runs}
    tokens: dict[str, int] = {}
    work: dict[str, Callable[[], object]] = {}
    device = None
    for label, folder in runs.items():
        begin(label)
        run = load_trained(folder)
        device = run.device
        write = run.recipe.task_class.decoding_workload(run, split)
        try:
            tokens[label] = write()
        except ValueError as refusal:  # a mechanism without a streaming form
            points[label].reason = str(refusal)
            points[label].status = "refused"
        else:
            work[label] = write
    begin(SIDE_BY_SIDE)
    if device is not None:
        seconds = interleaved_seconds(work, [ROUNDS], synchronize=synchronizer(device))
        for label, times in seconds.items():
            points[label].tokens_per_second = tokens[label] / statistics.median_high(times)
    return list(points.values())
