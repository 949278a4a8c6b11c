"""The process that measures, `python -m subquad.compare.measure.worker FOLDER`, for the comparison in FOLDER.

It answers requests as `subprocesses.Worker` describes: {"kind": "length" | "decoding" | "approximation", ...}.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from subquad.allocator import set_up_command
from subquad.compare.measure.approximation import measure_approximation
from subquad.compare.measure.decoding import measure_decoding
from subquad.compare.measure.lengths import measure_length
from subquad.compare.plan import Plan, read_plan


def main(folder: Path) -> None:
    set_up_command()  # as every command of subquad does: times of another allocator would be others
    plan = read_plan(folder)
    for line in sys.stdin:
        try:
            answer = {"found": _found(plan, json.loads(line))}
        except Exception as error:  # the next request may be a better one
            traceback.print_exc()
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        _tell(answer)


def _found(plan: Plan, request: dict[str, Any]) -> Any:
    if request["kind"] == "length":
        points = measure_length(plan, request["part"], request["length"], request["labels"], _begin)
        return [point.model_dump(mode="json") for point in points]
    if request["kind"] == "decoding":
        runs = {label: Path(folder) for label, folder in request["runs"].items()}
        return measure_decoding(runs, plan.split, plan.repeats, _begin)
    assert request["kind"] == "approximation", request
    run = request["run"]
    return [point.model_dump(mode="json") for point in measure_approximation(plan, run and Path(run), _begin)]


def _begin(step: str) -> None:
    _tell({"begin": step})


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
