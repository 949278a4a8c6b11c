"""Work in processes of its own: a crash, a full memory or an interruption ends that work and nothing else."""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

Log = Callable[[str], None]
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
            return _signal_words(self.code)
        said = [line for line in self.lines if line.strip()]
        return said[-1].removeprefix("subquad: error: ") if said else f"ended with code {self.code}"


def _signal_words(code: int) -> str:
    name = signal.Signals(-code).name
    return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def run_module(module: str, words: Sequence[str], log: Path, say: Log) -> Ended:
    """Runs `python -m MODULE WORDS`; what it says goes to the end of `log` and, line by line, to `say`.

    A child that was interrupted interrupts its parent.
    """
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with log.open("a", encoding="utf-8") as kept:
        child = _start([module, *words], subprocess.DEVNULL, subprocess.STDOUT)
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


class Answer(NamedTuple):
    """found: what was asked for, or None if there is an error; last: the step that had begun before it."""

    found: Any
    error: str | None
    last: str


class Worker:
    """A child that answers requests one after the other; after it died, the next request starts another.

    A request is a line of JSON. The child answers with lines: {"begin": STEP} any number of times, then {"found": ...}
    or {"error": WHY}. What it says on stderr goes to the end of `log`.
    """

    def __init__(self, module: str, words: Sequence[str], log: Path) -> None:
        self.words, self.log = [module, *words], log
        self.child: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any], say: Log) -> Answer:
        """say: told every step that begins."""
        if self.child is None:
            with self.log.open("a", encoding="utf-8") as kept:
                self.child = _start(self.words, subprocess.PIPE, kept)
        child, last = self.child, ""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it is gone already; below we learn why
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            for line in child.stdout:
                message = json.loads(line)
                if "begin" not in message:
                    return Answer(message.get("found"), message.get("error"), last)
                last = message["begin"]
                say(last)
            code, _ = _wait(child)
        except BaseException:
            self.child = None
            _end(child)
            raise
        self.child = None
        if code in INTERRUPTED:
            raise KeyboardInterrupt
        return Answer(None, _signal_words(code) if code < 0 else f"ended with code {code}; see {self.log}", last)

    def close(self) -> None:
        if self.child is not None:
            assert self.child.stdin is not None
            self.child.stdin.close()
            self.child.wait()
            self.child = None


def _start(words: Sequence[str], given: int, errors: IO[str] | int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


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
