"""What all parts of the benchmark share: a result with its target, and measuring side by side."""

import argparse
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from subquad.compare.measure.checks import CheckFailedError
from subquad.compare.measure.timing import Work, interleaved_seconds
from subquad.compare.statistics.times import SpeedRatio
from subquad.environment import environment
from subquad.kernels import dispatch

SIGNS: dict[str, Callable[[float, float], bool]] = {"at least": operator.ge, "at most": operator.le}
MEGABYTE = 1e6


def machine_facts(keeps_memory: bool, quick: bool = False) -> dict[str, Any]:
    """What times depend on, as it stands beside them in the report."""
    facts = {
        **environment(torch.device("cpu")),
        "kernels": dispatch.implementation("conv", torch.empty(1)),
        "allocator": "keeps freed memory" if keeps_memory else "system",
    }
    return facts | {"sizes": "toy sizes, no meaning"} if quick else facts


@dataclass
class Result:
    """One line of a table.

    labels say what was measured, numbers are what was, and `score` (named in the table's title) is compared with
    target = ("at least" | "at most", value). A result that is wrong has a reason instead of numbers.
    """

    table: str
    labels: dict[str, Any]
    numbers: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    target: tuple[str, float] | None = None
    reason: str | None = None
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By piece of work: median, min and max of the repeats, and how many there were."""
    control: SpeedRatio | None = None
    """How many times as fast as itself ours was, where it ran twice in every turn."""

    @property
    def verdict(self) -> str:
        if self.reason is not None:
            return "no figure"
        if self.target is None or self.score is None:
            return ""
        return "met" if SIGNS[self.target[0]](self.score, self.target[1]) else "MISSED"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class Effort:
    """How much time a comparison may take: repeats until `budget` seconds are spent, within the limits."""

    budget: float = 4.0
    least: int = 3
    most: int = 40
    quick: bool = False


QUICK = Effort(budget=0.0, least=1, most=1, quick=True)


def measuring_parser(
    text: str, parts: Iterable[str], repeats: int, budget: float | None = None
) -> argparse.ArgumentParser:
    """The options that every benchmark has. text: its module's docstring, of which the first line says what it does;
    budget: None where the number of repeats is fixed."""
    description, _, details = text.partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=details, formatter_class=form)
    add = parser.add_argument
    add("--quick", action="store_true", help="toy sizes and one repeat; the figures mean nothing")
    add("--only", choices=list(parts), action="append", help="measure this part; may be repeated")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    add("--repeats", type=int, default=repeats, help=f"least repeats of everything (default {repeats})")
    if budget is not None:
        add("--budget", type=float, default=budget, help=f"seconds that repeats may go on for (default {budget:g})")
    add("--json", type=Path, metavar="FILE", help="write all results; other parts in FILE are kept")
    add("--write-docs", type=Path, metavar="FILE", help="fill the generated parts of a page")
    return parser


def side_by_side(work: Mapping[str, Work], effort: Effort) -> dict[str, dict[str, float]]:
    """Seconds of every piece of work, in rounds that run each once; as many rounds as the effort allows."""
    one_round = sum(sum(kept) for kept in interleaved_seconds(work, [1], warmup=1).values())
    repeats = max(effort.least, min(effort.most, int(effort.budget / one_round)))
    return summary(interleaved_seconds(work, [repeats], warmup=0))


def summary(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"median": statistics.median(kept), "min": min(kept), "max": max(kept), "repeats": len(kept)}
        for name, kept in seconds.items()
    }


def milliseconds(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{name} ms": one["median"] * 1e3 for name, one in seconds.items()}


def interval(ratio: SpeedRatio) -> dict[str, float]:
    """Columns beside a score; none for a single turn, which has no interval."""
    return {"low": ratio.low, "high": ratio.high} if ratio.rounds > 1 else {}


def expect_close(what: str, value: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Raises CheckFailedError unless the largest error is at most `tolerance` of the largest exact value."""
    if value.shape != exact.shape:
        raise CheckFailedError(f"{what} has shape {tuple(value.shape)} instead of {tuple(exact.shape)}")
    error = ((value.double() - exact.double()).abs().max() / exact.abs().max().clamp(min=1e-300)).item()
    if not error <= tolerance:
        raise CheckFailedError(f"{what} is off by {error:.1e} of its largest value, allowed {tolerance:.0e}")
