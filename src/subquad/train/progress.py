"""What a training shows while it runs: loss, learning rate, tokens a second, the time left and memory."""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TextIO

import torch

from subquad.progress import Progress

SPEED_UPDATES = 50
"""Tokens a second are those of so many updates at the end."""
FORMATS = {"loss": ".3f", "ppl": ".2f"}
"""How metrics are written; others have four digits."""


class TrainingProgress:
    """Called after every update. A terminal shows every update on one line, a log every n-th as a line of its own."""

    def __init__(self, every: int = 100, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.shown, self.every = Progress(1.0, stream=stream, live=live), every
        self.recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=SPEED_UPDATES)

    def __call__(
        self, epoch: int, update: int, metrics: Mapping[str, float], tokens: int, lr: float, done: float
    ) -> None:
        """metrics: what to show of the update; tokens: targets of it; done: the share of the run that is over."""
        self.recent.append((time.monotonic(), tokens))
        self.shown.update(self.line(epoch, update, metrics, lr), done, log=update % self.every == 0)

    def note(self, message: str) -> None:
        """A line that stays."""
        self.shown.note(message)

    def pause(self) -> None:
        """After something else took time, such as a validation: it does not count as the updates' time."""
        self.recent.clear()
        self.recent.append((time.monotonic(), 0))

    def line(self, epoch: int, update: int, metrics: Mapping[str, float], lr: float) -> str:
        parts = [f"epoch {epoch}", f"update {update:,}"]
        parts += [f"{name} {value:{FORMATS.get(name, '.4g')}}" for name, value in metrics.items()]
        parts.append(f"lr {lr:.2e}")
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
