"""A few cases of everything that `make torture` tries, by the same program."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("babel", reason="the embedded phrases need the demo extra")

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parent.parent
TABLES = ["kill-saving", "kill-random", "damage", "disturbed", "memory", "streaming", "hostile"]
PARTS = ["kills", "damage", "disks", "long", "streaming", "hostile"]
DISKS = """
import json, sys
from pathlib import Path
from torture.disks import disturbances

print(json.dumps([result.as_json() for result in disturbances(Path(sys.argv[1]), ("commands",), 1)]))
"""


def tortured(folder: Path, *parts: str) -> list[dict[str, Any]]:
    """All lines of the tables of some parts. What was lost is in them, and in the exit code."""
    shutil.copy(ROOT / "docs" / "reliability.md", folder / "page.md")
    words = [word for part in parts for word in ("--only", part)]
    command = [sys.executable, "-m", "torture", "--quick", *words, "--json", str(folder / "all.json")]
    done = subprocess.run(
        [*command, "--write-docs", str(folder / "page.md")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (folder / "all.json").exists(), done.stderr
    report = json.loads((folder / "all.json").read_text())
    lines = [line for part in report["parts"].values() for line in part["results"]]
    wrong = [line for line in lines if line["verdict"] == "MISSED" or (line["reason"] and not not_tried(line))]
    assert done.returncode == 0 or wrong or any(map(not_tried, lines)), done.stderr
    return lines


def not_tried(line: dict[str, Any]) -> bool:
    """A disk of its own needs a system that lets a process mount one."""
    return str(line["reason"]).startswith("not tried")


def test_nothing_is_lost_and_the_page_says_so(tmp_path: Path) -> None:
    """One test, since its program takes a minute: each process of a parallel run would start it for its own part."""
    lines = tortured(tmp_path, *PARTS)
    assert {line["table"] for line in lines} >= set(TABLES)
    for line in lines:
        assert line["verdict"] == "met" or not_tried(line), line
    page = (tmp_path / "page.md").read_text()
    assert page.count("Not measured yet.") == 11, "of the parts that were not tried"
    for line in lines:
        assert next(iter(line["labels"].values())) in page


@pytest.mark.parametrize(
    "part",
    [
        "determinism",
        # these take long; test_full_disk.py, test_distributed.py, test_interruption.py, test_comparison.py and
        # test_agreement.py do a little of each
        pytest.param("two", marks=pytest.mark.nightly),
        pytest.param("results", marks=pytest.mark.nightly),
        pytest.param("scale", marks=pytest.mark.nightly),
        pytest.param("nodes", marks=pytest.mark.nightly),
        pytest.param("worlds", marks=pytest.mark.nightly),
        pytest.param("shared", marks=pytest.mark.nightly),
        pytest.param("cluster", marks=pytest.mark.nightly),
        pytest.param("trials", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_lost_in_the_longer_parts(part: str, tmp_path: Path) -> None:
    lines = tortured(tmp_path, part)
    assert lines
    for line in lines:
        assert line["reason"] is None, line
        assert line["verdict"] in ("met", ""), line  # efficiencies have no target


@pytest.mark.nightly  # test_full_disk.py gives the same commands files that may not grow
def test_commands_leave_nothing_on_a_full_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DISKS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = json.loads(done.stdout)
    assert line["verdict"] == "met" or not_tried(line), line
