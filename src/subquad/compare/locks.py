"""Locks for pieces of work, when several processes or machines share a folder.

The lock of a piece of work is a file that only one process can create. While that process works it touches the file
every few seconds; a lock that was not touched for a while belonged to a process that is gone, and is taken over. Ages
are measured by the folder's own clock, since the clocks of machines differ; a lock of the future was touched before
that clock was set back. A lock also says which process holds it: one of the same machine that is gone is known to be,
without waiting.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TOUCH_INTERVAL = 10.0
STALE_AFTER = 90.0
"""Seconds. Shared file systems may show an old time for up to a minute."""
POLL_INTERVAL = 3.0
"""Seconds between looks at what other processes do."""


def lock_path(out: Path, what: str) -> Path:
    """The file that is the lock of a piece of work in the folder of a comparison."""
    return out / "locks" / "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in what)


@contextmanager
def try_lock(path: Path, stale_after: float = STALE_AFTER) -> Iterator[bool]:
    """Whether this process holds the lock `path`, for as long as the block lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _acquire(path, stale_after):
        yield False
        return
    released = threading.Event()

    def touch() -> None:
        while not released.wait(TOUCH_INTERVAL):
            with suppress(FileNotFoundError):  # taken over, since this process was suspended for a long time
                os.utime(path)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield True
    finally:
        released.set()
        thread.join()
        path.unlink(missing_ok=True)


@contextmanager
def wait_for_lock(out: Path, what: str, log: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a piece of work, after waiting until nobody else does."""
    while True:
        with try_lock(lock_path(out, what)) as acquired:
            if acquired:
                yield
                return
        log(f"another process works on the {what}: waiting")
        time.sleep(POLL_INTERVAL)


def _acquire(path: Path, stale_after: float) -> bool:
    if _create(path):
        return True
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if not _is_abandoned(path, stale_after):
            return False
        path.rename(old)  # of several that find it old, one gets it
    except FileNotFoundError:  # its owner has just finished, or another took it
        return False
    if not _is_abandoned(old, stale_after):  # somebody was faster, and this is already the new owner's
        old.rename(path)
        return False
    old.unlink()
    return _create(path)


def _create(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(handle, _owner(os.getpid()).encode())
    os.close(handle)
    return True


def _is_abandoned(path: Path, stale_after: float) -> bool:
    """Whether a lock belongs to nobody: it is old, or its process has ended on this machine."""
    owner = path.read_text(errors="replace")
    place, _, rest = owner.rpartition(" process ")
    number = rest.partition(" ")[0]
    if place and number.isdecimal() and _owner(os.getpid()).startswith(f"{place} process "):
        return owner != _owner(int(number))
    return abs(_age(path)) >= stale_after


def _owner(process: int) -> str:
    """A process by the machine's boot, its space of process numbers, and the time it began; "" where Linux tells none.

    A process that has ended and is still listed (a zombie) began at no time.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        state, numbers = "X", []
    return f"{boot} {space} process {process} began {'never' if state in 'ZX' else numbers[18]}"


def _age(path: Path) -> float:
    """Seconds since the file was touched, by the clock of its file system."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.now")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime
