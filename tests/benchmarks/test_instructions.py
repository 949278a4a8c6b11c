"""benchmarks/instructions.py: its tables hold what valgrind counted, and everything that it counts runs."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import instructions
from benchmarks.page import filled
from subquad.mixers import available

ROOT = Path(__file__).parents[2]
COUNTS = {"softmax 32 ours": 2_000_000, "eva 32 ours": 3_000_000, "eva 32 original": 9_000_000}


def test_mechanisms_are_compared_with_softmax() -> None:
    first, second = instructions.results("short", COUNTS)
    assert (first.score, second.score) == (1, 1.5)
    assert second.labels == {"mechanism": "eva", "T": 32}
    assert second.numbers == {"ours millions": 3, "original millions": 9}


def test_causal_mechanisms_are_compared_with_causal_softmax() -> None:
    counts = COUNTS | {"causal softmax 32 ours": 1_000_000, "causal eva 32 ours": 4_000_000}
    assert list(instructions.results("short", counts))[-1].score == 4


def test_operations_are_compared_with_the_next_best() -> None:
    counts = {"lightconv 128 ours": 10, "lightconv 128 unfold": 90, "lightconv 128 band": 30}
    (result,) = instructions.results("operations", counts)
    assert result.score == 3


def test_totals_are_read(tmp_path: Path) -> None:
    (tmp_path / "counts.1").write_text("version: 1\nsummary: 42\n\nfn=(1) f\n1 42\n\ntotals: 42\n")
    assert instructions.total(tmp_path / "counts.1") == 42


@pytest.mark.parametrize("part", list(instructions.PARTS))
def test_everything_that_is_counted_runs(part: str) -> None:
    names = []
    for name, work in instructions.PARTS[part](True):
        work()
        names.append(name)
    assert len(set(names)) == len(names)
    if part in ("mechanisms", "short"):
        assert all(any(mixer in name for name in names) for mixer in available())


def test_it_needs_valgrind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="needs valgrind"):
        instructions.main(["--only", "step"])


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_counts_the_same_twice() -> None:
    first, second = (instructions.count("operations", True) for _ in range(2))
    assert first.keys() == second.keys()
    for name, found in first.items():
        assert found > 10_000
        assert second[name] == pytest.approx(found, rel=0.05)


def test_the_committed_page_is_what_was_counted() -> None:
    page, report = (ROOT / "docs/performance.md").read_text(), json.loads((ROOT / "docs/instructions.json").read_text())
    assert filled(page, report, instructions.TITLES, instructions.MARKER) == page, "run `make bench-instructions`"
