"""The counts of docs/architecture.md are those of the code as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import house_counts
from tools.house_counts import BEGIN, END, crowded_folders

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"


def outdated(folder: Path) -> Path:
    """The page with other counts."""
    page = folder / "page.md"
    before, _, rest = PAGE.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\nold counts\n{END}{rest.partition(END)[2]}")
    return page


def test_the_page_is_current(tmp_path: Path) -> None:
    page = outdated(tmp_path)
    # in a process of its own: an audit hook stays until the end
    command = [sys.executable, "-m", "tools.house_counts", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert page.read_text() == PAGE.read_text(), "run `make docs`"


def test_a_page_that_is_out_of_date_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = outdated(tmp_path)
    before = page.read_text()
    monkeypatch.setattr(house_counts, "house_table", lambda: "new counts\n")
    monkeypatch.setattr(sys, "argv", ["house_counts", str(page), "--check"])
    assert house_counts.main() == 1
    assert page.read_text() == before
    monkeypatch.setattr(sys, "argv", ["house_counts", str(page)])
    assert house_counts.main() == 0
    monkeypatch.setattr(sys, "argv", ["house_counts", str(page), "--check"])
    assert house_counts.main() == 0


def test_no_folder_is_crowded() -> None:
    """One file for each mechanism or command aside, a folder has about twelve."""
    assert all(number <= 15 for number in crowded_folders().values()), crowded_folders()
