"""The counts of docs/architecture.md are those of the code as it is."""

import shutil
import subprocess
import sys
from pathlib import Path

from tools.house_counts import BEGIN, END, crowded_folders

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"


def count(page: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: an audit hook stays until the end."""
    command = [sys.executable, "-m", "tools.house_counts", str(page), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_page_is_current() -> None:
    done = count(PAGE, "--check")
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_out_of_date_is_noticed(tmp_path: Path) -> None:
    shutil.copy(PAGE, tmp_path / "page.md")
    page = tmp_path / "page.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\nold counts\n{END}{rest.partition(END)[2]}")
    assert count(page, "--check").returncode == 1
    assert count(page).returncode == 0
    assert page.read_text() == PAGE.read_text()


def test_no_folder_is_crowded() -> None:
    """One file for each mechanism or command aside, a folder has about twelve."""
    assert all(number <= 15 for number in crowded_folders().values()), crowded_folders()
