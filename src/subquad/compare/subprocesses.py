"""Work in processes of its own: a crash, a full memory or an interruption ends that work and nothing else."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from subquad.processes import INTERRUPTED, TERMINATED, Terminated

Log = Callable[[str], None]
"""Receives lines that say how work goes on."""
INTERRUPTIONS = {
    INTERRUPTED: KeyboardInterrupt,
    -signal.SIGINT: KeyboardInterrupt,
    TERMINATED: Terminated,
    -signal.SIGTERM: Terminated,
}
"""How processes end that were asked to, and what that raises in the one that started them."""
PATIENCE = 120.0
"""Seconds that an interrupted process has to end by itself, so that a training can save."""
KEPT_LINES = 20
LISTEN_SECONDS = 0.5
"""How long an interruption may have to wait while a process prints nothing."""


class Ended(NamedTuple):
    """How a process ended. peak_bytes: of its memory, None where the system does not tell; lines: its last output."""

    code: int
    peak_bytes: int | None
    lines: list[str]

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        if self.code < 0:
            return _describe_signal(self.code)
        lines = [line for line in self.lines if line.strip()]
        return lines[-1].removeprefix("subquad: error: ") if lines else f"ended with code {self.code}"


def _describe_signal(code: int) -> str:
    name = signal.Signals(-code).name
    return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def run_module(module: str, arguments: Sequence[str], log_file: Path, log: Log) -> Ended:
    """Runs `python -m MODULE ARGUMENTS`; its output is appended to `log_file` and passed to `log`, line by line.

    A process that was interrupted interrupts the one that started it. Its stdin is open as long as the one that
    started it lives (`processes.end_with_parent`).
    """
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with log_file.open("a", encoding="utf-8") as file:
        process = _start([module, *arguments], subprocess.PIPE, subprocess.STDOUT)
        output = _listen(process)

        def read_output() -> None:
            while (line := _next_line(output)) is not None:
                file.write(line)
                file.flush()
                last.append(line.rstrip())
                log(line.rstrip())

        try:
            read_output()
            ended = Ended(*_wait(process), list(last))
        except BaseException:
            _end(process)
            read_output()  # it says what it has kept
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()
    if ended.code in INTERRUPTIONS:
        raise INTERRUPTIONS[ended.code]
    return ended


def _listen(process: "subprocess.Popen[str]") -> "queue.SimpleQueue[str | None]":
    """The lines that a process prints, and None after the last.

    A thread reads them: where one thread interrupts another, as Ray does, a read that waits is not ended by it.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next_line(lines: "queue.SimpleQueue[str | None]") -> str | None:
    while True:
        with suppress(queue.Empty):
            line = lines.get(timeout=LISTEN_SECONDS)
            if line is None:
                lines.put(None)  # for whoever asks again
            return line


class Answer(NamedTuple):
    """result: what was asked for, or None if there is an error; last_step: the step that had begun before the error."""

    result: Any
    error: str | None
    last_step: str


class WorkerProcess:
    """A process that answers requests one after the other; if it dies, the next request starts another.

    A request is a line of JSON. The process answers with lines: {"step": NAME} any number of times, then
    {"result": ...} or {"error": WHY}. Its errors are appended to `log_file`.
    """

    def __init__(self, module: str, arguments: Sequence[str], log_file: Path) -> None:
        self.command, self.log_file = [module, *arguments], log_file
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any], log: Log) -> Answer:
        """log: receives the name of every step that begins."""
        if self.process is None:
            with self.log_file.open("a", encoding="utf-8") as errors:
                self.process = _start(self.command, subprocess.PIPE, errors)
        process, last_step = self.process, ""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it is gone already; below we learn why
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if "step" not in message:
                    return Answer(message.get("result"), message.get("error"), last_step)
                last_step = message["step"]
                log(last_step)
            code, _ = _wait(process)
        except BaseException:
            self.process = None
            _end(process)
            raise
        self.process = None
        if code in INTERRUPTIONS:
            raise INTERRUPTIONS[code]
        why = _describe_signal(code) if code < 0 else f"ended with code {code}; see {self.log_file}"
        return Answer(None, why, last_step)

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def _start(command: Sequence[str], stdin: int, stderr: IO[str] | int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def _wait(process: subprocess.Popen[str]) -> tuple[int, int | None]:
    """The exit code and the peak of memory."""
    if not hasattr(os, "wait4"):  # Windows
        return process.wait(), None
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _end(process: subprocess.Popen[str]) -> None:
    """Lets a process end by itself, which Ctrl-C has reached as well; then asks it to; then kills it.

    It is asked by SIGTERM: a second SIGINT would end it at once. A second Ctrl-C here kills it.
    """
    try:
        for request, seconds in ((None, 1.0), (signal.SIGTERM, PATIENCE)):
            if request is not None:
                process.send_signal(request)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
