"""The fuzz tests with many more examples, other ones at every call, within limits of memory and time."""

import os
import resource
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measured import Result
from torture.kills import outcome

ROOT = Path(__file__).parent.parent
TITLES = {"fuzz": "tests that failed, hung, or needed more memory than they may"}
MEMORY = 6 << 30
"""Bytes that a file of tests may hold, of which torch and its libraries have one or two."""
HOURS = 2
BAD = ("failure", "error")
"""What pytest's report calls a test that did not pass."""


def fuzzing(folder: Path, factor: int) -> Iterator[Result]:
    """factor: how many times the examples of the normal suite."""
    environment = os.environ | {"SUBQUAD_FUZZ": str(factor), "OMP_NUM_THREADS": "1"}
    for tests in sorted((ROOT / "tests").rglob("test_fuzz_*.py"), key=lambda file: file.name):
        report = folder / f"{tests.stem}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), f"--junitxml={report}"]
        labels: dict[str, object] = {"tests": tests.stem, "times the examples": factor}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=ROOT,
                preexec_fn=_limited,
                timeout=3600 * HOURS,
                capture_output=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            yield outcome("fuzz", labels, {}, [f"not over after {HOURS} hours"])
            continue
        if not report.exists():
            yield outcome("fuzz", labels, {}, [done.stdout.decode(errors="replace")])
            continue
        cases = list(ElementTree.parse(report).iter("testcase"))
        wrong = [f"{case.get('name')}: {part.get('message')}" for case in cases for part in case if part.tag in BAD]
        yield outcome("fuzz", labels, {"tests": len(cases)}, wrong)


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
