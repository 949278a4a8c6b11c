"""A new measurement is one file and one entry in the list: measured by the worker, stored, and part of the result."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from subquad.compare import measure
from subquad.compare.comparison import Comparison, Shard
from subquad.compare.measure import cache
from subquad.compare.measure.base import Measurement
from subquad.compare.plan import open_plan
from subquad.compare.report.result import read_result
from tests.compare.plans import PAIRS, make_plan

pytestmark = pytest.mark.usefixtures("preloaded_programs")

UNTRAINED = Shard(1, 2)
"""The shard that measures what needs no trained models."""
TOY = """
import os
from pathlib import Path

from subquad.compare.measure.base import Measurement, Step
from subquad.compare.records import Point


class LetterPoint(Point):
    letters: int = 0


class Letters(Measurement):
    name, point, needs_trials = "letters", LetterPoint, False

    def steps(self, plan):
        return [Step("letters", "letters of the labels", {})]

    def measure(self, out, plan, labels, arguments, begin):
        points = []
        for label in labels:
            begin(label)
            if label == "eva" and (out / "deadly").exists():
                os._exit(3)
            points.append(LetterPoint(mechanism=label, letters=len(label)))
        return points
"""
WORKER = """
import sys
from collections.abc import Iterator
from pathlib import Path

from subquad.compare import measure
from subquad.compare.measure.worker import main
from toy_measurement import Letters

measure.MEASUREMENTS = (*measure.MEASUREMENTS, Letters())
main(Path(sys.argv[1]))
"""


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measurement]:
    """The toy measurement in the list, here and in the process that measures."""
    (tmp_path / "toy_measurement.py").write_text(TOY)
    (tmp_path / "toy_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    from toy_measurement import Letters

    monkeypatch.setattr(cache, "WORKER", "toy_worker")
    monkeypatch.setattr(measure, "MEASUREMENTS", (*measure.MEASUREMENTS, Letters()))
    yield Letters()
    del sys.modules["toy_measurement"]


def compared(out: Path, mixers: list[str]) -> Comparison:
    """A comparison without trials."""
    return Comparison(out, open_plan(make_plan(PAIRS, mixers, seeds=()), out), "softmax")


def letters_of(comparison: Comparison) -> dict[str, tuple[str, int]]:
    comparison.write_report("toy")
    found = read_result(comparison.out / "result.json").measurements["letters"]
    return {point.mechanism: (point.status, point.letters) for point in found}  # type: ignore[attr-defined]


def test_it_is_measured_once_and_again_when_a_mechanism_joins(tmp_path: Path, letters: Measurement) -> None:
    out, said = tmp_path / "out", list[str]()
    compared(out, ["eva"]).run(lambda done, total, message: said.append(f"{done}/{total} {message}"), UNTRAINED)
    assert said[-1] == "1/1 letters of the labels: 2 of 2 mechanisms measured"
    assert letters_of(compared(out, ["eva"])) == {"softmax": ("done", 7), "eva": ("done", 3)}
    assert compared(out, ["eva"]).open_steps(UNTRAINED) == []
    grown = compared(out, ["eva", "lara"])
    assert [step.name for _, step in grown.open_steps(UNTRAINED)] == ["letters"]
    grown.run(shard=UNTRAINED)
    assert letters_of(grown)["lara"] == ("done", 4)


def test_a_mechanism_that_ends_the_process_costs_its_own_point_only(tmp_path: Path, letters: Measurement) -> None:
    out = tmp_path / "out"
    comparison = compared(out, ["eva", "lara"])
    (out / "deadly").touch()
    comparison.run(shard=UNTRAINED)
    assert letters_of(comparison) == {"softmax": ("done", 7), "eva": ("failed", 0), "lara": ("done", 4)}
