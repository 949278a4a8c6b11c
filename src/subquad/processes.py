"""What every process of subquad does around its work: exit codes, errors in one line, and how it ends when asked to."""

import errno
import os
import re
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""The exit codes of a process that Ctrl-C (SIGINT) or SIGTERM has ended."""
NO_MEMORY = re.compile("OutOfMemoryError|can't allocate memory")  # how torch says it, on a GPU and on the CPU
MAX_ERROR = 2000
"""Characters of an error that are shown: it may quote a line of data, which has millions of them."""
LOST_PROCESS = re.compile(
    "gloo/transport|Connection closed by peer|Connection reset by peer|ncclRemoteError|remote server shutdown or crash"
)

BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of writing, so that a text can be shown as another."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send at the end of a job's time, ends work as Ctrl-C does, with another exit code."""


class InterruptionError(Exception):
    """A command was asked to end. The message says what is kept; `exit_code` tells which signal asked."""

    def __init__(self, cause: KeyboardInterrupt) -> None:
        super().__init__(f"interrupted: {cause}" if str(cause) else "interrupted")
        self.exit_code = TERMINATED if isinstance(cause, Terminated) else INTERRUPTED


def end_with_parent() -> None:
    """From now on this process ends at once when the one that started it, and holds its stdin open, is gone.

    What that process was killed by, or the machine that goes on with its work, has not asked this one to end.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(TERMINATED)

    threading.Thread(target=watch, daemon=True).start()


def raise_terminated(*_: object) -> None:
    raise Terminated


@contextmanager
def interruptible(sigterm: bool = True) -> Iterator[None]:
    """Within the block, Ctrl-C ends a command with an InterruptionError, and so does SIGTERM if `sigterm` is True."""
    before = signal.signal(signal.SIGTERM, raise_terminated) if sigterm else None
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptionError(error) from None
    finally:
        if sigterm:
            signal.signal(signal.SIGTERM, before)


def _exit_in_thread(*_: object) -> None:
    """Handles SIGTERM within `exit_on_sigterm`, whose thread does what there is to do."""


@contextmanager
def exit_on_sigterm(message: str) -> Iterator[None]:
    """Within it SIGTERM ends this process at once, with a line that says what is kept.

    A handler in Python runs when the main thread comes back to Python, which it does not while a process waits for
    others. So a thread reads what the system's part of the handler writes. Within `stop_requests` SIGTERM is
    remembered instead.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1)[0]:
            if number == signal.SIGTERM:
                print(f"subquad: interrupted: {message}", file=sys.stderr, flush=True)
                os._exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, _exit_in_thread)
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, before)
        os.write(writer, b"\0")  # no signal: the thread's work is over
        thread.join()
        os.close(reader)
        os.close(writer)


class StopRequest:
    """Whether SIGINT or SIGTERM has asked this process to come to an orderly end.

    The first one is remembered. A second Ctrl-C raises KeyboardInterrupt at once. A second SIGTERM changes nothing:
    one request may arrive by several ways, and whoever is out of patience sends SIGKILL.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def receive(self, number: int, _: object) -> None:
        """Handles a signal."""
        if self.signal is None:
            self.signal = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def error(self, message: str) -> KeyboardInterrupt:
        """Returns what to raise at the orderly end. A request that only another process received counts as SIGTERM."""
        return KeyboardInterrupt(message) if self.signal == signal.SIGINT else Terminated(message)


OWN_HANDLERS = (signal.SIG_DFL, signal.default_int_handler, raise_terminated, _exit_in_thread)
"""Handlers that are Python's or ours, and not those of a program that calls us."""


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within the block, SIGINT and SIGTERM are remembered instead of raised.

    Only the main thread receives signals; in others there are no requests. Handlers of somebody else's, and signals
    that are ignored, stay as they are.
    """
    request = StopRequest()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in OWN_HANDLERS:
                before[number] = signal.signal(number, request.receive)
    watched = before.get(signal.SIGTERM) is _exit_in_thread
    descriptor = signal.set_wakeup_fd(-1) if watched else -1  # what is remembered here must not be read by its thread
    try:
        yield request
    finally:
        for stopped, handler in before.items():
            signal.signal(stopped, handler)
        if watched:
            signal.set_wakeup_fd(descriptor)


def run_main(main: Callable[[], None]) -> int:
    """Runs a program to its end and returns its exit code; an error is one line on stderr."""
    try:
        with interruptible():
            main()
    except InterruptionError as error:
        print(f"subquad: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        print(f"subquad: error: {error_line(error)}", file=sys.stderr)
        return 1
    return 0


def error_line(error: Exception) -> str:
    """Returns what went wrong and what to do about it, in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        text = _system_error(error)
    elif isinstance(error, ValueError | OSError):
        text = str(error)
    elif isinstance(error, MemoryError) or NO_MEMORY.search(f"{type(error).__name__}: {error}"):
        text = "out of memory: smaller batches (train.budget, --batch, --tokens) and shorter sequences need less"
    elif isinstance(error, RuntimeError) and LOST_PROCESS.search(str(error)):
        text = "another process of this torchrun ended (see its message); the same command goes on from a checkpoint"
    else:
        text = f"{type(error).__name__}: {error} (this is a defect of subquad; --debug shows where)"
    line = printable(" ".join(text[:MAX_ERROR].split()))
    return line if len(text) <= MAX_ERROR else f"{line} ..."


def _system_error(error: OSError) -> str:
    """Returns what the system refused, and what to do about it."""
    reasons = {
        FileNotFoundError: "there is no such file or folder; check the path",
        FileExistsError: "there is a file already where a folder is needed; give another path",
        NotADirectoryError: "a part of this path is a file where a folder is needed; give another path",
        IsADirectoryError: "this is a folder, and a file is needed",
        PermissionError: "permission denied; check who owns it, or give another path",
    }
    advice = {
        errno.ENOSPC: "; make room, and give the same command again",
        errno.EDQUOT: "; make room, and give the same command again",
        errno.EFBIG: "; raise the limit of file sizes (ulimit -f), and give the same command again",
        errno.EROFS: "; write to another folder, or mount it for writing",
    }
    reason = reasons.get(type(error)) or f"{error.strerror}{advice.get(error.errno or 0, '')}"
    return f"{error.filename}: {reason}"


def printable(text: str) -> str:
    """Returns a text in which characters that would act on a terminal are shown as escapes.

    These are control characters, of which the escape sequences of terminals consist, line separators, halves of
    surrogate pairs, and characters that change the direction of writing. Line breaks and tabs stay.

    >>> print(printable("a" + chr(27) + "[31m" + chr(0x202E) + "b"))
    a\\x1b[31m\\u202eb
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(letter) if _acts_on_terminal(letter) else letter for letter in text)


def _acts_on_terminal(letter: str) -> bool:
    return letter not in "\n\t" and (unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in BIDI)


def _escape(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"
