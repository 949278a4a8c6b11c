"""What a measurement is: something that is measured on the machine, for all mechanisms of a comparison side by side.

A measurement is one file with a subclass of `Measurement`, and an entry in the list `MEASUREMENTS` of this folder. It
consists of steps. A step is measured by a process of its own (`worker`), stored in a file, and measured again only if
what it depends on has changed (`cache`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

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
class Margin:
    """A difference in quality that makes no practical difference, or that share of the baseline's value."""

    value: float
    is_relative: bool = False

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """From a number, or from a share such as "2%"."""
        number, sign, rest = str(text).partition("%")
        try:
            value = float(number) / (100 if sign else 1)
        except ValueError:
            value = -1.0
        if rest or not 0 <= value < math.inf:
            raise ValueError(f"a margin is a number of at least 0, such as 0.5, or a share such as 2% (got {text})")
        return cls(value, bool(sign))


@dataclass(frozen=True)
class Context:
    """The comparison that is measured. max_seconds: see `Lengths`. margin: None is that of the task's metric."""

    out: Path
    plan: Plan
    trials: Trials
    baseline: str
    max_seconds: float
    margin: Margin | None = None


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
        """The mechanisms that are measured; a model without mixing is none."""
        return [variant.label for variant in context.plan.variants if not variant.is_floor]

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
