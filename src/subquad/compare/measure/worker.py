"""The process that measures, `python -m subquad.compare.measure.worker OUT`, for the comparison in the folder OUT.

It answers requests as `WorkerProcess` describes. A request names a measurement, its mechanisms and its
arguments; the result is the list of its points.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from subquad.allocator import set_up_command
from subquad.compare import measure
from subquad.compare.plan import Plan, read_plan


def main(out: Path) -> None:
    set_up_command()  # as every command of subquad does: times of another allocator would be others
    plan = read_plan(out)
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"result": _measure(out, plan, json.loads(line))}
        except Exception as error:  # the next request may be a better one
            traceback.print_exc()
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        _send(answer)


def _measure(out: Path, plan: Plan, request: dict[str, Any]) -> list[dict[str, Any]]:
    measurement = next(one for one in measure.MEASUREMENTS if one.name == request["measurement"])
    arguments = request["arguments"]
    points = measurement.measure(out, plan, request["labels"], arguments, lambda step: _send({"step": step}))
    return [point.model_dump(mode="json") for point in points]


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
