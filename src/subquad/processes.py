"""What every process of subquad does around its work: exit codes, errors in one line, and how it ends when asked to."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit code of a process that was interrupted."""
NO_MEMORY = re.compile("OutOfMemoryError|can't allocate memory")  # how torch says it, on a GPU and on the CPU
LOST_PROCESS = re.compile("gloo/transport|Connection closed by peer|Connection reset by peer|ncclRemoteError")


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
    return " ".join(text.split())


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
