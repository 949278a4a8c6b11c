"""Work in processes of its own: a crash, a full memory or an interruption ends that work and nothing else."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

Say = Callable[[str], None]
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)
"""How processes end that were asked to."""
PATIENCE = 30.0
"""Seconds that an interrupted child has to end by itself."""
KEPT_LINES = 20


class Ended(NamedTuple):
    """How a child ended. peak_bytes: of its memory, None where the system does not tell; lines: the last it said."""

    code: int
    peak_bytes: int | None
    lines: list[str]

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        if self.code < 0:
            name = signal.Signals(-self.code).name
            return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        said = [line for line in self.lines if line.strip()]
        return said[-1].removeprefix("subquad: error: ") if said else f"ended with code {self.code}"


def run_module(module: str, words: Sequence[str], log: Path, say: Say, *, errors_apart: bool = False) -> Ended:
    """Runs `python -m MODULE WORDS`; what it says goes to the end of `log` and, line by line, to `say`.

    errors_apart: what it says on stderr goes to the log only. A child that was interrupted interrupts its parent.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with log.open("a", encoding="utf-8") as kept:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=kept if errors_apart else subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                kept.write(line)
                kept.flush()
                last.append(line.rstrip())
                say(line.rstrip())
            ended = Ended(*_wait(child), list(last))
        except BaseException:
            _end(child)
            raise
    if ended.code in INTERRUPTED:
        raise KeyboardInterrupt
    return ended


def _wait(child: subprocess.Popen[str]) -> tuple[int, int | None]:
    """Code and peak of memory."""
    if not hasattr(os, "wait4"):  # Windows
        return child.wait(), None
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _end(child: subprocess.Popen[str]) -> None:
    """Lets a child end by itself, which Ctrl-C has reached as well; then asks, then insists."""
    for ask, seconds in ((None, 1.0), (signal.SIGINT, PATIENCE), (signal.SIGKILL, None)):
        if ask is not None:
            child.send_signal(ask)
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue
