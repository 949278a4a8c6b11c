"""Programs that are forked from a process with torch in it are programs like any other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import afresh, preloaded

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere programs are started as always")
PROGRAM = """
import os, sys, time
if sys.argv[1:] == ["wait"]:
    print("ready", flush=True)
    time.sleep(60)
print(__name__, sys.argv[1:], os.getcwd(), os.environ["WORD"], os.getppid(), sys.stdin.read())
print("a complaint", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("how", ["module", "file", "code"])
def test_it_sees_and_says_the_same(how: str, program: Path) -> None:
    named = {"module": ["-m", "program"], "file": [str(program)], "code": ["-c", PROGRAM]}[how]
    command = [sys.executable, *named, "a", "b"]
    environment = os.environ | {"WORD": "word"}

    def run() -> tuple[int, str, str]:
        done = subprocess.run(
            command, cwd=program.parent, env=environment, input="given", capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    usual = run()
    with preloaded():
        assert run() == usual
    assert usual[0] == 3


def test_it_can_be_killed(program: Path) -> None:
    with preloaded():
        command = [sys.executable, "-m", "program", "wait"]
        process = subprocess.Popen(command, cwd=program.parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_what_it_starts_is_quick_too(program: Path) -> None:
    starter = "import subprocess, sys; print(subprocess.run([sys.executable, '-m', 'second'], text=True).returncode)"
    program.write_text(starter)
    program.with_name("second.py").write_text("import sys; sys.exit(5 if 'torch' in sys.modules else 0)")
    with preloaded():
        done = subprocess.run([sys.executable, "-m", "program"], cwd=program.parent, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_it_can_be_started_as_always() -> None:
    found = []
    for how in (preloaded, afresh):
        with preloaded(), how():
            command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
            found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found == ["True\n", "False\n"]
