"""Results of several machines become one table, if they are of one comparison."""

from pathlib import Path

import pytest

from subquad.cli.main import run as command
from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.report.merge import merge, merge_files
from subquad.compare.report.quality import differences
from subquad.compare.report.result import Result, read_result
from tests.compare.cases import covariance
from tests.compare.report.results import bare, by_seeds, timed


def machine(labels: str, values: dict[str, float], ms: dict[str, float], cpu: str) -> Result:
    result = bare(labels)
    for label, value in values.items():
        by_seeds(result, label, value)
        timed(result, label, {2048: ms[label]})
    result.covariance = covariance(result, 0.1)
    result.environment = {"cpu": cpu}
    return result


@pytest.fixture
def results() -> list[Result]:
    base = {"softmax": 30.0}
    return [
        machine("softmax eva", {**base, "eva": 29.0}, {"softmax": 10.0, "eva": 5.0}, "one"),
        machine("softmax lara", {**base, "lara": 28.0}, {"softmax": 20.0, "lara": 5.0}, "two"),
    ]


def test_trials_are_put_together_and_times_are_not(results: list[Result]) -> None:
    merged = merge(results)
    assert merged.labels == ["softmax", "eva", "lara"]
    assert {label: round(found.mean, 6) for label, found in differences(merged).items()} == {"eva": -1, "lara": -2}
    assert [point.mechanism for point in merged.points(LengthPoint)] == ["softmax", "eva"], "those of the first machine"
    assert merged.covariance is not None
    assert len(merged.covariance.trials) == 9
    assert "times are compared within one machine only" in merged.notes[0]


def test_files_are_merged_by_the_command(
    results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, result in zip(paths, results, strict=True):
        result.to_json(path)
    assert command(["merge", *map(str, paths), "--out", str(tmp_path / "out")]) == 0
    assert "lara" in capsys.readouterr().out
    assert read_result(tmp_path / "out" / "result.json").labels == ["softmax", "eva", "lara"]
    assert (tmp_path / "out" / "report.html").exists()


def test_what_does_not_belong_together_is_refused(results: list[Result], tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    results[0].to_json(first)
    with pytest.raises(ValueError, match="two results or more"):
        merge_files([first])
    results[1].trials[0].scores["BLEU"].value += 1
    results[1].recipe = {"task": "other"}
    results[1].to_json(second)
    with pytest.raises(ValueError, match=r"not of one comparison: recipe\.task, softmax with seed 1 differ"):
        merge_files([first, second])
