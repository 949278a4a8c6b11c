"""Processes that work for a comparison: what is known of those that fail, and what happens after."""

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
