"""Locks of pieces of work in a folder that several processes share."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from subquad.compare.locks import try_lock


def test_a_lock_is_one_process_s_until_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "eva-1"
    with try_lock(path) as first:
        with try_lock(path) as second:
            assert (first, second) == (True, False)
        assert path.exists()
        path.write_text("of another machine")
        long_ago = path.stat().st_mtime - 1000
        os.utime(path, (long_ago, long_ago))
        with try_lock(path) as third:
            assert third
            with try_lock(path) as fourth:
                assert not fourth
            path.write_text("of another machine")
            later = path.stat().st_mtime + 1000
            os.utime(path, (later, later))
            with try_lock(path) as fifth:
                assert fifth, "nobody touches it: the clock was set back after its owner was gone"
    assert list(path.parent.iterdir()) == []


HOLDING = """
import sys
from pathlib import Path
from subquad.compare.locks import try_lock
with try_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "eva-1"
    command = [sys.executable, "-c", HOLDING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with try_lock(path) as acquired:
            assert not acquired, "it lives"
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
        with try_lock(path) as acquired:
            assert acquired
