"""docs/results.md: what the comparisons measured, and nothing else."""

import subprocess
import sys
from pathlib import Path

from subquad.compare.result import read_result, write_result
from tests.comparison_cases import synthetic

ROOT = Path(__file__).parent.parent


def write_page(docs: Path, *comparisons: str) -> str:
    command = [sys.executable, "-m", "benchmarks.results", *comparisons, "--docs", str(docs)]
    subprocess.run(command, cwd=ROOT, check=True)
    return (docs / "results.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_results_say(tmp_path):
    (tmp_path / "results").symlink_to(ROOT / "docs" / "results")
    assert write_page(tmp_path) == (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_a_comparison_becomes_a_section_with_its_size_budget_seeds_and_machine(tmp_path):
    result = synthetic()
    result.recipe["train"] = {"updates": 4000, "epochs": None, "budget": {"max_tokens": 4096, "max_sentences": None}}
    write_result(result, tmp_path / "result.json")
    page = write_page(tmp_path, f"example={tmp_path}")
    assert "## example" in page
    assert result.command in page
    for said in ("million parameters", "4,000 updates of at most 4,096 tokens", "seeds: 1, 2, 3", "Example CPU"):
        assert said in page
    assert all(f"| {label} |" in page for label in result.labels)
    assert "1 failed" in page
    kept = read_result(tmp_path / "results" / "example.json")
    assert [cell.scores for cell in kept.cells] == [cell.scores for cell in result.cells]
    assert write_page(tmp_path) == page
