"""Processes that work for a comparison: what is known of those that fail, and what happens after."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from subquad.compare.subprocesses import WorkerProcess, run_module

DYING = """
import json, os, signal, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"step": request["step"]}), flush=True)
    if request["step"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if request["step"] == "leave":
        sys.exit(3)
    print(json.dumps({"result": [request["step"], os.getpid()]}), flush=True)
"""


def test_a_worker_that_died_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker, steps = WorkerProcess("dying", [], tmp_path / "log.txt"), list[str]()
    first, again = (worker.ask({"step": "work"}, steps.append) for _ in range(2))
    assert first.result == again.result, "the same process"
    died = worker.ask({"step": "die"}, steps.append)
    assert (died.result, died.error, died.last_step) == (None, "ended by SIGKILL (out of memory?)", "die")
    left = worker.ask({"step": "leave"}, steps.append)
    assert left.error is not None
    assert left.error.startswith("ended with code 3")
    assert worker.ask({"step": "work"}, steps.append).result[1] != first.result[1]
    assert steps == ["work", "work", "die", "leave", "work"]
    worker.close()


def test_why_a_child_failed_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text("import sys\nprint('on the way')\nsys.exit('subquad: error: it is so')")
    (tmp_path / "stopped.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heard: list[str] = []
    ended = run_module("failing", [], tmp_path / "log.txt", heard.append)
    assert (ended.code, ended.reason) == (1, "it is so")
    assert heard[0] == "on the way"
    assert (tmp_path / "log.txt").read_text().splitlines() == heard
    assert ended.peak_bytes is not None
    assert ended.peak_bytes > 1 << 20
    with pytest.raises(KeyboardInterrupt):
        run_module("stopped", [], tmp_path / "log.txt", heard.append)


CHILD = """
import os, sys, time
from subquad.processes import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(120)
"""
PARENT = """
import sys
from pathlib import Path
from subquad.compare.subprocesses import run_module
run_module("child", [], Path(sys.argv[1]), lambda line: print(line, flush=True))
"""


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log.txt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "(zombie)" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
