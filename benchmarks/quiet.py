"""Whether the machine is quiet enough for figures that go into the documentation.

A run that writes docs is refused at the start when the machine's load is above 0.5. Before its first part and after
every part a control is timed: two copies of the same work, in turns. Where peers are compared, turns have controls of
their own. A part whose controls did not all come out equal is not written. Runs that write no docs are never refused;
what their controls were stands beside their figures. Toy sizes have no control: their figures mean nothing, and say so.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

from subquad.compare.measure.timing import Work, interleaved_seconds
from subquad.compare.statistics.times import LOOKS, SpeedRatio, speed_ratio

MOST_LOAD = 0.5
"""Processes that wanted to run in the last minute before the start."""
EQUAL = 1.1
"""A control came out equal if its whole interval lies between 1 / EQUAL and EQUAL."""


class Watch:
    """Watches over a run. options: those of `measuring_parser`; threads and the allocator are set up before."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.publishes = options.write_docs is not None and not options.quick
        self.load = os.getloadavg()[0]
        if self.publishes and self.load > MOST_LOAD:
            raise SystemExit(
                f"The machine is busy: its load is {self.load:.2f}, and figures for {options.write_docs} are measured "
                f"at a load of at most {MOST_LOAD}. End what else is running, or leave out --write-docs."
            )
        self.last = None if options.quick else time_control()

    def judge(self, own: Sequence[SpeedRatio] = ()) -> tuple[str | None, dict[str, Any]]:
        """Returns why the part that has just ended is not published, if so, and what is said beside its figures.

        own: controls inside the part.
        """
        if self.last is None:
            return None, {}
        before, self.last = self.last, time_control()
        controls = (before, self.last, *own)
        facts = {"load": round(self.load, 2), "control": describe(max(controls, key=_distance_from_equal))}
        if all(is_equal(control) for control in controls) or not self.publishes:
            return None, facts
        return f"the same work twice came out as {facts['control']} times as fast: the machine is busy", facts


def time_control() -> SpeedRatio:
    """How many times as fast one of two copies of a piece of work is: some milliseconds of products and gradients."""
    work: dict[str, Work] = {name: _product() for name in ("first", "second")}
    seconds = interleaved_seconds(work, [LOOKS[-1]])
    return speed_ratio(seconds["first"], seconds["second"], 1)


def is_equal(control: SpeedRatio) -> bool:
    return _distance_from_equal(control) <= EQUAL


def describe(ratio: SpeedRatio) -> str:
    return f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _distance_from_equal(control: SpeedRatio) -> float:
    return max(control.high, 1 / control.low)


def _product() -> Work:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 256, generator=generator)
    weight = torch.randn(256, 256, generator=generator).requires_grad_()
    return lambda: torch.autograd.grad(torch.tanh(x @ weight).sum(), weight)
