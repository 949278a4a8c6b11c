"""The process that measures: `python -m subquad.compare.work FOLDER KIND REQUEST`, started by the runner.

It reads the plan of the comparison in FOLDER and a request in JSON, and answers in lines of JSON on stdout:
{"begin": WHAT} before each step, {"found": RESULT} or {"error": WHY} at the end. If it dies, the last step is known.
"""

import json
import sys
from pathlib import Path
from typing import Any

from subquad.allocator import set_up_command
from subquad.compare.approximation import measure_approximation
from subquad.compare.decoding import measure_decoding
from subquad.compare.lengths import measure_length
from subquad.compare.plan import Plan, read_plan


def _begin(what: str) -> None:
    _tell({"begin": what})


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _found(plan: Plan, kind: str, request: dict[str, Any]) -> Any:
    if kind == "length":
        points = measure_length(plan, request["part"], request["length"], request["labels"], _begin)
        return [point.model_dump(mode="json") for point in points]
    if kind == "decoding":
        runs = {label: Path(folder) for label, folder in request["runs"].items()}
        return {label: list(speed) for label, speed in measure_decoding(runs, plan.split, plan.repeats, _begin).items()}
    assert kind == "approximation", kind
    run = request["run"]
    return [
        point.model_dump(mode="json") for point in measure_approximation(plan, Path(run) if run else None, _begin)
    ]


def main(folder: str, kind: str, request: str) -> None:
    set_up_command()  # as every command of subquad does: times of other allocators would be others
    try:
        _tell({"found": _found(read_plan(Path(folder)), kind, json.loads(request))})
    except Exception as error:
        _tell({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
