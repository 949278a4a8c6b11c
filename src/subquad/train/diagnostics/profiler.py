"""Where the time of an update goes: shares of its phases by the clock, and operators by torch's profiler.

The trainer marks its phases (`with phases("forward"): ...`); nothing is measured until a profile starts.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from subquad.files import write_json

MODEL = ("forward", "backward", "optimiser")
PHASES = ("data", *MODEL, "report")
OTHER = "other"
PROFILE = "profile.json"
WARM_UP = 3
TRACED = 5
"""Updates under torch's profiler at most: it slows them down, so they are not those that the clock measures."""
LISTED = 15
UNMEASURED = nullcontext()


class Phases:
    """Seconds spent in each named phase while `running`."""

    def __init__(self) -> None:
        self.running = False
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._measured(name) if self.running else UNMEASURED

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        _finish_kernels()
        self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True)
class Operator:
    """An operator of torch. share: its part of the time of all operators, without those that it calls."""

    name: str
    calls: float
    """For each update."""
    milliseconds: float
    """For each update."""
    share: float


@dataclass(frozen=True)
class Profile:
    """Where the time of `updates` updates went."""

    updates: int
    seconds: float
    phases: dict[str, float]
    """Seconds of each phase, and of everything else as `other`."""
    operators: list[Operator]

    @property
    def shares(self) -> dict[str, float]:
        return {name: value / self.seconds for name, value in self.phases.items()}

    @property
    def model_share(self) -> float:
        """The part of the time in the model: forward, backward, optimiser."""
        return sum(self.shares[name] for name in MODEL)

    def write(self, run: Path) -> None:
        write_json(run / PROFILE, {**asdict(self), "shares": self.shares, "model_share": self.model_share})


def profile_updates(advance: Callable[[], Any], phases: Phases, updates: int) -> Profile:
    """Profiles `updates` calls of `advance`, each an update that marks its phases, after some to warm up."""
    for _ in range(WARM_UP):
        advance()
    _finish_kernels()
    phases.running = True
    start = time.perf_counter()
    for _ in range(updates):
        advance()
    seconds = time.perf_counter() - start
    phases.running = False
    measured = {**phases.seconds, OTHER: seconds - sum(phases.seconds.values())}
    return Profile(updates, seconds, measured, _operators(advance, min(updates, TRACED)))


def _operators(advance: Callable[[], Any], updates: int) -> list[Operator]:
    """Returns the operators that take the most time in `updates` further updates."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as trace:
        for _ in range(updates):
            advance()
    rows = [(row.self_device_time_total if on_gpu else row.self_cpu_time_total, row) for row in trace.key_averages()]
    total = sum(time_ for time_, _ in rows) or 1.0
    rows.sort(key=lambda row: -row[0])
    return [
        Operator(row.key, row.count / updates, microseconds / updates / 1000, microseconds / total)
        for microseconds, row in rows[:LISTED]
    ]


def _finish_kernels() -> None:
    """Waits for the GPU, which computes while the program goes on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
