"""What a measurement is: something that is measured on the machine, for all mechanisms of a comparison side by side.

A measurement is one file with a subclass of `Measurement`, and an entry in the list `MEASUREMENTS` of this folder. It
consists of steps. A step is measured by a process of its own (`worker`), stored in a file, and measured again only if
what it depends on has changed (`cache`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subquad.compare.plan import Plan
from subquad.compare.records import Point
from subquad.compare.trials import Trials

Begin = Callable[[str], None]
"""Called with the name of what begins, so that a process that dies has said what it died of."""
SIDE_BY_SIDE = "all, side by side"
"""The name of work in which no single mechanism is at fault."""


@dataclass(frozen=True)
class Step:
    """A part of a measurement. name: that of its file; title: what people read; arguments: which part it is."""

    name: str
    title: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Context:
    """The comparison that is measured. max_seconds: see `Lengths`."""

    out: Path
    plan: Plan
    trials: Trials
    baseline: str
    max_seconds: float


class Measurement(ABC):
    """One kind of measurement."""

    name: ClassVar[str]
    point: ClassVar[type[Point]]
    """The record of a mechanism."""
    needs_trials: ClassVar[bool]
    """Whether it uses trained models: then it has to wait until all trials have ended."""

    @abstractmethod
    def steps(self, plan: Plan) -> Sequence[Step]:
        """What is measured, in this order."""

    def labels(self, context: Context) -> list[str]:
        """The mechanisms that are measured."""
        return context.plan.labels

    def inputs(self, context: Context) -> dict[str, Any]:  # noqa: ARG002
        """What the numbers depend on besides the plan and the mechanisms, such as trained runs (relative to `out`)."""
        return {}

    @abstractmethod
    def measure(
        self, out: Path, plan: Plan, labels: Sequence[str], arguments: Mapping[str, Any], begin: Begin
    ) -> Sequence[Point]:
        """Measures a step, in the measuring process. arguments: those of the step together with the inputs."""

    def refused(self, context: Context, step: Step) -> Sequence[Point]:  # noqa: ARG002
        """The points of mechanisms that are not tried, each with its reason."""
        return []

    def failed(self, plan: Plan, step: Step, label: str, reason: str) -> Point:  # noqa: ARG002
        """The point of a mechanism that ended the measuring process."""
        return self.point(mechanism=label, status="failed", reason=reason)
