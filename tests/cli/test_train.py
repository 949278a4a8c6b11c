"""`subquad train` as a program of its own."""

import signal
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes/small/digits.yaml"


def test_a_job_that_ran_out_of_time_ends_as_an_interrupted_one(tmp_path: Path) -> None:
    """Schedulers send SIGTERM."""
    command = [sys.executable, "-m", "subquad", "train", str(RECIPE), "train.updates=100000"]
    child = subprocess.Popen([*command, "--out", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        while "parameters" not in child.stderr.readline():
            assert child.poll() is None, "it ended before it began"
        child.send_signal(signal.SIGTERM)
        rest = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 130
    assert rest.endswith("subquad: interrupted\n")
