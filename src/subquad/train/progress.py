"""What a training shows while it runs: loss, learning rate, tokens a second, the time left and memory."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

import torch

from subquad.progress import Progress

SPEED_UPDATES = 50
"""Tokens a second are those of so many updates at the end."""


@dataclass(frozen=True)
class Status:
    """What an update did. done: the share of the run that is over, for the time left; extra: further numbers."""

    epoch: int
    update: int
    loss: float
    nll: float | None = None
    """Mean -log p of a target, from which the perplexity follows; None: the task has none."""
    tokens: int = 0
    rate: float | None = None
    done: float | None = None
    extra: Mapping[str, float] | None = None


class TrainingProgress:
    """Called after every update. A terminal shows every update on one line, a log every n-th as a line of its own."""

    def __init__(self, every: int = 100, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.shown, self.every = Progress(1.0, stream=stream, live=live), every
        self.recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=SPEED_UPDATES)

    def __call__(self, status: Status) -> None:
        self.recent.append((time.monotonic(), status.tokens))
        self.shown.update(self.line(status), status.done, log=status.update % self.every == 0)

    def note(self, message: str) -> None:
        """A line that stays."""
        self.shown.note(message)

    def pause(self) -> None:
        """After something else took time, such as a validation: it does not count as the updates' time."""
        self.recent.clear()
        self.recent.append((time.monotonic(), 0))

    def line(self, status: Status) -> str:
        parts = [f"epoch {status.epoch}", f"update {status.update:,}", f"loss {status.loss:.3f}"]
        if status.nll is not None:
            parts.append(f"ppl {math.exp(status.nll) if status.nll < 700 else math.inf:.2f}")
        parts += [f"{name} {value:.4g}" for name, value in (status.extra or {}).items()]
        if status.rate is not None:
            parts.append(f"lr {status.rate:.2e}")
        if (speed := self.tokens_per_second()) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        parts.append(f"{peak_memory() / 2**30:.2f} GB")
        return " | ".join(parts)

    def tokens_per_second(self) -> float | None:
        passed = self.recent[-1][0] - self.recent[0][0]
        tokens = sum(count for _, count in list(self.recent)[1:])
        return tokens / passed if passed > 0 and tokens else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shown.close()


def peak_memory() -> int:
    """Bytes at the worst moment so far: of the GPU where torch uses one, otherwise of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_metrics(values: Mapping[str, float], first: Sequence[str] = ()) -> str:
    """Metrics in one line, those of `first` before the others."""
    order = [*(name for name in first if name in values), *(name for name in values if name not in first)]
    return ", ".join(f"{name} {values[name]:.4g}" for name in order)
