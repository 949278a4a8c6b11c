"""Advice before training: from measured layers, from a recipe's model, and from stored results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad.cli.main import run as command
from subquad.compare.advice.advise import NO_STUDY, Advice, advise, parse_bytes
from subquad.compare.advice.studies import CostStudy, Observation
from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.report.result import Result
from subquad.compare.report.study import StudyPart, write_parts
from tests.compare.cases import LENGTHS, SHAPES, synthetic

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[3]
RECIPE = "phrases"
TINY = ["--lengths", "8,16,24,32", "--rounds", "2", "--dim", "16", "--heads", "2"]


def read(path: Path) -> Advice:
    return Advice.model_validate(json.loads(path.read_text()))


def test_the_command_measures_predicts_and_says_what_to_run(tmp_path: Path) -> None:
    words = ["advise", "--length", "600", "--causal", "--memory", "1M", "--mixers", "lightconv,lara", *TINY]
    line = [sys.executable, "-m", "subquad", *words, "--json", str(tmp_path / "advice.json")]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=True)
    advice = read(tmp_path / "advice.json")
    softmax, lightconv, lara = advice.rows
    assert [row.mechanism for row in advice.rows] == ["softmax", "lightconv", "lara"]
    assert (lara.status, lara.seconds) == ("refused", None)
    assert f"refused: lara: {lara.reason}\n" in ended.stdout
    assert "causal" in str(lara.reason)
    assert softmax.speed is None
    assert lightconv.speed is not None
    for row in (softmax, lightconv):
        assert row.longest == 32
        assert row.seconds is not None
        assert row.bytes is not None
        assert 0 < row.seconds.low <= row.seconds.high  # type: ignore[operator]
        assert all(value >= 0 for values in row.coefficients.values() for value in values)
        assert 600 * 16 * 4 < row.bytes.value < 600**2 * 100  # type: ignore[operator]
    assert NO_STUDY in ended.stdout
    assert "600 tokens are far beyond the 32 that were measured" in ended.stdout
    assert ended.stdout.endswith(f"Next:\n  {advice.command}\n")
    assert advice.command.startswith("subquad compare RECIPE.yaml --mixers softmax")
    assert "--lengths 256,600,1024 --tokens 16384" in advice.command


@pytest.mark.nightly
def test_a_recipe_is_measured_as_a_whole_and_the_command_is_for_it() -> None:
    advice = subquad.advise(100, recipe=RECIPE, mixers=["lightconv", "lara"], lengths=[8, 12, 16, 32], rounds=1)
    assert [(row.mechanism, row.status) for row in advice.rows] == [
        (n, "done") for n in ("softmax", "lightconv", "lara")
    ]
    assert any("lara" in note and "decoder" in note for note in advice.notes), "where it is not used"
    needed = advice.rows[0].bytes
    assert needed is not None
    assert needed.low is not None
    assert needed.low > 1 << 20, "weights, gradients and averages count"
    assert advice.command.startswith(f"subquad compare {RECIPE} --mixers softmax")


# ---------------------------------------------------------------------- stored results


def stored(tmp_path: Path, name: str = "result.json") -> Path:
    synthetic().to_json(tmp_path / name)
    return tmp_path / name


def test_stored_results_tell_cost_and_quality(tmp_path: Path) -> None:
    advice = subquad.advise(32768, results=[stored(tmp_path)], memory="16G")
    rows = {row.mechanism: row for row in advice.rows}
    assert list(rows) == list(SHAPES)
    for label, (_, fixed, growing, _) in SHAPES.items():
        expected = 2.2 * 32768 * (fixed + growing * 32768) / 1000  # what the synthetic times are made of
        found = rows[label].seconds
        assert found is not None
        assert 0.95 * found.low < expected < 1.05 * found.high  # type: ignore[operator]
        assert rows[label].coefficients["seconds"][2] == pytest.approx(2.2e-3 * growing, rel=0.3, abs=1e-8)
    softmax, eva = rows["softmax"], rows["eva"]
    assert softmax.longest == LENGTHS[-2], "it failed at the longest"
    assert eva.speed is not None
    assert eva.speed.low > 1  # type: ignore[operator]
    assert eva.quality is not None
    assert eva.quality.endswith("at 2,048 tokens")
    crossing = (SHAPES["eva"][1] - SHAPES["softmax"][1]) / (SHAPES["softmax"][2] - SHAPES["eva"][2])
    assert eva.crossover is not None
    assert eva.crossover.low < crossing < eva.crossover.high  # type: ignore[operator]
    assert rows["lightconv"].fits
    assert NO_STUDY not in advice.notes
    assert set(advice.candidates) <= set(SHAPES) - {"softmax"}
    assert subquad.advise(32768, results=[stored(tmp_path)], memory=1000).rows[0].fits is False
    two = subquad.advise(512, results=[stored(tmp_path), stored(tmp_path, "other.json")])
    assert len(two.rows) == 2 * len(SHAPES)
    assert any("compare rows of one result only" in note for note in two.notes)


def with_few_lengths(count: int) -> Result:
    result = synthetic()
    result.measurements["lengths"] = [point for point in result.points(LengthPoint) if point.length in LENGTHS[:count]]
    return result


def test_a_result_with_few_lengths_tells_quality_alone(tmp_path: Path) -> None:
    """Costs are measured then, of causal layers if that is wanted."""
    with_few_lengths(3).to_json(tmp_path / "result.json")
    layers: Any = {"lengths": [8, 12, 16, 24], "rounds": 1, "dim": 16, "heads": 2}
    advice = subquad.advise(64, results=[tmp_path / "result.json"], mixers=["lightconv"], causal=True, **layers)
    assert advice.notes[0].startswith("Costs: one causal layer")
    (told,) = [note for note in advice.notes if note.startswith("Quality")]
    assert told.startswith("Quality at 2,048 tokens (")
    assert all(f" {label} " in told for label in SHAPES if label != "softmax")
    assert NO_STUDY not in advice.notes
    both = [stored(tmp_path, "enough.json"), tmp_path / "result.json"]
    assert told in subquad.advise(64, results=both).notes, "beside the costs of another result"
    with pytest.raises(ValueError, match="causal is for single layers"):
        advise(64, results=both, causal=True)


def test_a_study_tells_quality_at_its_lengths(tmp_path: Path) -> None:
    parts = [StudyPart(recipe="r", length=length, folder=f"r-{length}") for length in (256, 1024, 4096)]
    for part in parts[:2]:  # the last has not ended
        result = with_few_lengths(1).model_copy(update={"task_lengths": [part.length]})
        (tmp_path / part.folder).mkdir()
        result.to_json(tmp_path / part.folder / "result.json")
    write_parts(tmp_path, parts)
    advice = advise(64, results=[tmp_path / "study.json"], mixers=["lightconv"], lengths=[8, 12, 16, 24], rounds=1)
    told = [note.partition(" (")[0] for note in advice.notes if note.startswith("Quality")]
    assert told == ["Quality at 256 tokens", "Quality at 1,024 tokens"]


def test_noise_of_rounds_widens_intervals() -> None:
    """The medians lie on a curve exactly; only the rounds tell how sure they are."""

    def study(spread: float) -> CostStudy:
        found = CostStudy("a toy", "softmax")
        for name, (b, c) in {"softmax": (1e-5, 1e-7), "conv": (5e-5, 0.0)}.items():
            costs = {length: b * length + c * length**2 for length in (64, 128, 256, 512, 1024)}
            found.observations[name] = [
                Observation(length, (cost * (1 - spread), cost, cost * (1 + spread)), 1.0)
                for length, cost in costs.items()
            ]
        return found

    sure, unsure = (
        study(spread).fit_seconds("conv", "softmax").crossover("conv", "softmax") for spread in (0.001, 0.1)
    )
    assert sure.value == unsure.value == pytest.approx(400)
    assert unsure.low < sure.low < 400 < sure.high < unsure.high


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--length", "0"], "the length must be at least 1 (got 0)"),
        (["--length", "64", "--memory", "much"], "memory is a number with a unit, such as 16G or 800M (got much)"),
        (["--length", "64", "--mixers", "evva"], "no mechanism is called 'evva'; did you mean 'eva'?"),
        (["--length", "64", "--lengths", "8,16,8"], "costs are predicted from 4 measured lengths or more (got 2)"),
        (["--length", "64", "--causal", "--recipe", str(RECIPE)], "causal is for single layers"),
        (["--length", "64", "--results", "nowhere.json"], "holds no comparison: there is no nowhere.json in it"),
        (["--length", "64", "--json", "nowhere/advice.json"], "the name of a file in an existing folder is needed"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["advise", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("text", "size"), [("16G", 2**34), ("1.5k", 1536), (2000, 2000), ("3 MiB", 3 * 2**20)])
def test_sizes_of_memory(text: Any, size: int) -> None:
    assert parse_bytes(text) == size
