"""How far long work has come, on stderr: one live line on a terminal, drawn by rich, and plain lines in a log file.

The command line and data preparation report through `Progress`, and training through `TrainingProgress`.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

REFRESH_SECONDS = 0.2
"""The time between two changes of a terminal's line."""
LOG_SECONDS = 10.0
"""The least time between two lines of a log, where updates come more often."""
SPEED_UPDATES = 50
"""The speed of training is the mean of so many of the last updates."""
BAR_WIDTH = 12
BETWEEN = " | "
"""What stands between the parts of a message."""
FORMATS = {"loss": ".3f", "ppl": ".2f"}
"""How metrics of an update are written; the others have four digits."""


class Progress:
    """Shows messages, and the time left where it is known how much there is to do. Used as a context.

    A terminal shows the newest message on one line that changes, with a bar and the times. Anything else gets a plain
    line for an update at most every ten seconds, or exactly for those that say `log=True`. A `note` always stays.
    """

    def __init__(self, total: float | None = None, *, stream: TextIO | None = None, live: bool | None = None) -> None:
        """total: the value of `done` at which the work is over; None: not known, so that no time left is shown.

        stream: stderr if it is not given. live: whether to draw as on a terminal; by default the stream decides.
        """
        self.total, self.done = total, 0.0
        self.stream = stream if stream is not None else sys.stderr
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb" if live is None else live
        self.started = self.logged = time.monotonic()
        self.drawn = 0.0
        self.counts_steps = False
        self.first: tuple[float, float] | None = None
        """The time of the first update, and what was done by then: it warms up, or goes on with earlier work."""
        self._bar = self._start_bar() if self.live else None

    def update(self, message: str | Sequence[str], done: float | None = None, *, log: bool | None = None) -> None:
        """Shows what is happening now. done: how much is finished in all, in the unit of `total`.

        message: a text, or parts of one with the most important first; a terminal shows as many as fit its width.
        log: whether a log gets a line for it; None: if the last line is ten seconds old.
        """
        now = time.monotonic()
        if done is not None:
            self.done = done
            self.first = self.first or (now, done)
        if self._bar is not None:
            if log or now - self.drawn >= REFRESH_SECONDS:
                self.drawn = now
                self._draw(message)
        elif log or (log is None and now - self.logged >= LOG_SECONDS):
            self.logged = now
            left, text = self.seconds_left(), message if isinstance(message, str) else BETWEEN.join(message)
            self._print(text if left is None else f"{text}, {format_duration(left)} left")

    def __call__(self, message: str) -> None:
        """One more of `total` steps is done. In a log every step is a line."""
        self.counts_steps = True
        number = int(self.done) + 1
        of = f"/{self.total:g}" if self.total is not None else ""
        passed = "" if self.live else f", {format_duration(time.monotonic() - self.started)}"
        self.update(f"[{number}{of}{passed}] {message}", number, log=True)

    def report(self, done: int, total: int, message: str) -> None:
        """A message of work that counts its own steps: between two of them, `done` stays the same."""
        self.total = total
        if done > self.done:
            self(message)
        else:
            self.update(message)

    def restart(self, total: float | None) -> None:
        """Begins another piece of work, whose time left has nothing to do with the last one's."""
        self.total, self.done, self.first = total, 0.0, None

    def note(self, message: str) -> None:
        """Prints a line that stays."""
        if self._bar is None:
            self._print(message)
        else:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def seconds_left(self) -> float | None:
        """The time left at the mean speed since the first update, if both it and the total are known."""
        if self.total is None or self.first is None or self.done <= self.first[1]:
            return None
        start, before = self.first
        return (time.monotonic() - start) * max(0.0, self.total - self.done) / (self.done - before)

    def close(self) -> None:
        """Removes the live line."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def _start_bar(self) -> "RichProgress":
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        message = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False, table_column=message)]
        columns.append(BarColumn(bar_width=BAR_WIDTH))
        columns.append(TextColumn("{task.fields[times]}", markup=False))
        # No thread draws: the process may fork. What is printed to a file must not come out on the terminal instead.
        bar = RichProgress(
            *columns,
            console=Console(file=self.stream, force_terminal=True),
            auto_refresh=False,
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        bar.add_task("", total=self.total, times="")
        bar.start()
        return bar

    def _draw(self, message: str | Sequence[str]) -> None:
        assert self._bar is not None
        times = format_duration(time.monotonic() - self.started)
        if (left := self.seconds_left()) is not None:
            times += f", {format_duration(left)} left"
        width = self._bar.console.width - len(times) - BAR_WIDTH - 2  # two spaces between three columns
        text = message if isinstance(message, str) else fit_parts(message, width)
        (task,) = self._bar.task_ids
        self._bar.update(task, total=self.total, completed=self.done, description=text, times=times)
        self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.counts_steps and self.total is not None and self.done < self.total and not self.live:
            self.done = self.total - 1  # there were fewer steps than expected
            self("done")
        self.close()


class TrainingProgress(Progress):
    """Shows loss, learning rate, targets a second, memory and the time left of a training.

    A terminal shows every update on one line, a log every n-th as a line of its own.
    """

    def __init__(self, every: int = 100, *, stream: TextIO | None = None, live: bool | None = None) -> None:
        """every: how many updates of a log share a line. stream, live: see `Progress`."""
        super().__init__(1.0, stream=stream, live=live)
        self.every = every
        self.recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=SPEED_UPDATES)

    def show_update(
        self,
        epoch: int,
        update: int,
        metrics: Mapping[str, float],
        targets: int,
        lr: float,
        done: float,
        unit: str = "targets",
    ) -> None:
        """Shows an update. targets: how many tokens or labels it learned to predict, which are called `unit`.

        done: the run's finished share.
        """
        self.recent.append((time.monotonic(), targets))
        parts = [f"epoch {epoch}", f"update {update:,}"]
        parts += [f"{name} {value:{FORMATS.get(name, '.4g')}}" for name, value in metrics.items()]
        parts.append(f"lr {lr:.2e}")
        if (speed := self.targets_per_second()) is not None:
            parts.append(f"{speed:,.0f} {unit}/s")
        parts.append(f"{peak_memory() / 2**30:.2f} GB")
        self.update(parts, done, log=update % self.every == 0)

    def pause(self) -> None:
        """Leaves the time since the last update, such as that of a validation, out of the speed."""
        self.recent.clear()
        self.recent.append((time.monotonic(), 0))

    def targets_per_second(self) -> float | None:
        """The speed of the last updates; None before the first."""
        passed = self.recent[-1][0] - self.recent[0][0]
        tokens = sum(count for _, count in list(self.recent)[1:])
        return tokens / passed if passed > 0 and tokens else None


def fit_parts(parts: Sequence[str], width: int) -> str:
    """Returns as many of the first parts as fit a width; the first is always there.

    >>> fit_parts(["update 10", "loss 2.000", "lr 1.00e-03"], 25)
    'update 10 | loss 2.000'
    """
    shown = parts[0]
    for part in parts[1:]:
        if len(shown) + len(BETWEEN) + len(part) > width:
            break
        shown += f"{BETWEEN}{part}"
    return shown


def peak_memory() -> int:
    """Bytes at the worst moment so far: of the GPU where torch uses one, otherwise of the process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_metrics(values: Mapping[str, float]) -> str:
    """Metrics in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def format_duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour.

    >>> format_duration(75), format_duration(3600)
    ('1:15', '1:00:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
