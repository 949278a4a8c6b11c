"""Commands of subquad in child processes that are killed, disturbed or watched.

A child is forked from a process that has imported much and computed nothing: it starts at once, and to the system it is
a process like any other. (After a kernel has run, a fork would have other kernels: the threads do not come along.)
"""

import ctypes
import errno
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# what every child would import for seconds
import babel.numbers  # noqa: F401
import numba  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401

import subquad
from subquad.cli.main import run as command

PATIENCE = 600.0
"""Seconds after which a child hangs, and is a failure."""
CHECKPOINTS = "checkpoints"
PACKAGE = str(Path(subquad.__file__).parent)
CHANGES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})
"""Python's audit events of operations on files."""
NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS and CLONE_NEWUSER of sched.h


@dataclass(frozen=True)
class Ended:
    """How a child ended; a negative code is a signal. said: all it wrote to stdout and stderr."""

    code: int
    said: str

    @property
    def last(self) -> str:
        lines = self.said.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def is_clear(self) -> bool:
        """Whether it ended well, or with one line for people."""
        clear = self.last.startswith(("subquad: error: ", "subquad: interrupted"))
        return self.code == 0 or (clear and "Traceback" not in self.said and "defect of subquad" not in self.last)


class Child:
    """A command that has begun."""

    def __init__(
        self,
        words: Sequence[str],
        before: Callable[[], None] | None = None,
        stdin: Path | None = None,
        stdout: Path | None = None,
    ) -> None:
        """before: called in the child first. stdin, stdout: files in their place; stdout is kept as text without it."""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            _be(lambda: command(words), before, self.log.fileno(), stdin, stdout)

    def is_over(self) -> bool:
        """Whether it has ended; it stays there until `wait`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, patience: float = PATIENCE) -> Ended:
        end = time.monotonic() + patience
        while not self.is_over():
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"a child did not end within {patience:g} seconds")
            time.sleep(0.005)
        _, status = os.waitpid(self.pid, 0)
        self.log.seek(0)
        said = self.log.read().decode(errors="replace")
        self.log.close()
        return Ended(os.waitstatus_to_exitcode(status), said)


def _be(
    work: Callable[[], int], before: Callable[[], None] | None, log: int, stdin: Path | None, stdout: Path | None
) -> NoReturn:
    """The life of a child: streams, what comes before, the work, and no return."""
    code = 70
    try:
        given = os.open(stdin or os.devnull, os.O_RDONLY)
        out = log if stdout is None else os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for source, target in ((given, 0), (out, 1), (log, 2)):
            os.dup2(source, target)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background ignore Ctrl-C
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        if before is not None:
            before()
        code = work()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def done(words: Sequence[str], before: Callable[[], None] | None = None) -> Ended:
    """A command, to its end."""
    return Child(words, before).wait()


def apart(work: Callable[[], Any]) -> Any:
    """work() in a child; its result must be JSON. Whatever it raises is a RuntimeError here, with its traceback."""
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            path = Path(file.name)
            _be(lambda: 0 * path.write_text(json.dumps(work())), None, log.fileno(), None, None)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            log.seek(0)
            raise RuntimeError(f"ended with code {code}: {log.read().decode(errors='replace')}")
        return json.loads(Path(file.name).read_text())


# ---------------------------------------------------------------------- failpoints


class Failpoint:
    """Does something before the n-th operation on the files of checkpoints. `install` it in a child.

    act "kill", "SIGINT" or "SIGTERM": the process gets that signal; the name of an error, such as "ENOSPC": the
    operation fails with it; "count": nothing happens, and `count` is written to a file at the end.
    """

    def __init__(self, act: str, number: int = 0, counted: Path | None = None, within: str = f"/{CHECKPOINTS}") -> None:
        """within: what the paths of the operations have in them."""
        self.act, self.number, self.counted, self.count, self.within = act, number, counted, 0, within

    def install(self) -> None:
        sys.addaudithook(self._seen)

    def _seen(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not _is_within(event, arguments, self.within):
            return
        self.count += 1
        if self.act == "count":
            assert self.counted is not None
            handle = os.open(self.counted, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(handle, str(self.count).encode())
            os.close(handle)
        elif self.count == self.number:
            if self.act.startswith("E"):
                number = getattr(errno, self.act)
                raise OSError(number, os.strerror(number))
            os.kill(os.getpid(), getattr(signal, self.act if self.act.startswith("SIG") else f"SIG{self.act.upper()}"))


def _is_within(event: str, arguments: tuple[Any, ...], name: str) -> bool:
    """Removing a folder names what is in it without its path, but with a handle of the folder.

    Modules that are imported do not count: a package of ours is called checkpoints, too.
    """
    removed = event in ("os.remove", "os.rmdir") and len(arguments) > 1 and arguments[1] >= 0
    path = str(arguments[0])
    return removed or (name in path and not path.startswith(PACKAGE))


# ---------------------------------------------------------------------- what a child needs of the machine


def own_mounts() -> None:
    """Lets this process mount file systems that nobody else sees; an OSError where the system does not allow it."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | NEW_USER):
        number = ctypes.get_errno()
        raise OSError(number, f"no mounts of its own: {os.strerror(number)}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_of(child: Child, seconds: float, began: Callable[[], bool]) -> Iterator[int]:
    """Its memory, again and again from where it `began` until it ends."""
    while not child.is_over() and not began():
        time.sleep(seconds)
    while not child.is_over():
        yield resident_bytes(child.pid)
        time.sleep(seconds)


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they started; of one that is gone, none."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        children = [int(word) for word in path.read_text().split()]
    except OSError:
        children = []
    return [one for child in children for one in (child, *descendants(child))]
