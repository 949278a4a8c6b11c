"""What every process of subquad does around its work: exit codes, errors in one line, and how it ends when asked to."""

import re
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit code of a process that was interrupted."""
NO_MEMORY = re.compile("OutOfMemoryError|can't allocate memory")  # how torch says it, on a GPU and on the CPU
LOST_PROCESS = re.compile("gloo/transport|Connection closed by peer|Connection reset by peer|ncclRemoteError")

BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of writing, so that a text can be shown as another."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which schedulers send at the end of a job's time, raises KeyboardInterrupt as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_main(main: Callable[[], None]) -> int:
    """Runs a program to its end and returns its exit code; an error is one line on stderr."""
    try:
        with terminated_as_interrupted():
            main()
    except KeyboardInterrupt:
        print("subquad: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        print(f"subquad: error: {error_line(error)}", file=sys.stderr)
        return 1
    return 0


def error_line(error: Exception) -> str:
    """What went wrong, and what to do about it, in one line."""
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
    return printable(" ".join(text.split()))


def _system_error(error: OSError) -> str:
    """What the system refused, and what to do; most of what is likely is refused before it comes to this."""
    reasons = {
        FileNotFoundError: "there is no such file or folder; check the path",
        FileExistsError: "there is a file already where a folder is needed; give another path",
        NotADirectoryError: "a part of this path is a file where a folder is needed; give another path",
        IsADirectoryError: "this is a folder, and a file is needed",
        PermissionError: "permission denied; check who owns it, or give another path",
    }
    return f"{error.filename}: {reasons.get(type(error), error.strerror)}"


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
