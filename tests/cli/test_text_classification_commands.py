"""Text classifiers under the commands, as programs: train, evaluate, classify, export, import, compare."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from subquad.api import load_run
from subquad.cli.main import run as command
from tests.tasks.test_text_classification import SAMPLES, recipe_data, write_folder, write_table

pytestmark = pytest.mark.usefixtures("preloaded_programs")


def subquad(*words: str | Path, given: str = "", code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "subquad", *map(str, words)]
    found = subprocess.run(program, input=given, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert found.returncode == code, found.stderr
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the commands trained, on class folders and a table; the texts of more than 6 tokens are cut."""
    folder = tmp_path_factory.mktemp("reviews")
    train = write_folder(folder / "train", [*SAMPLES * 4, ("pos", "good " * 9)])
    test = write_table(folder / "test.tsv", SAMPLES)
    splits = {"train": train, "valid": train, "test": test}
    given = recipe_data(splits, max_length=6, long_texts="cut")
    (folder / "reviews.yaml").write_text(yaml.safe_dump(given))
    trained = subquad("train", folder / "reviews.yaml", "--out", folder / "run")
    assert "train: 1 of 25 texts cut to their first 6 tokens" in trained.stderr
    assert "top1" in trained.stderr
    return folder / "run"


def classes_of(line: str) -> dict[str, float]:
    pairs = [part.rsplit(" ", 2) for part in line.split(": ")[-1].split(", ")]
    return {label: float(percent) for label, percent, _ in pairs}


def test_evaluate(run: Path) -> None:
    shown = subquad("evaluate", run).stdout
    assert "top-1|classes:2" in shown
    found = json.loads((run / "evaluation-test.json").read_text())
    assert (found["task"], found["samples"], found["lost"]) == ("text-classification", 6, 0)


def test_classify_answers_every_line(run: Path) -> None:
    lines = ["good film", "", "bad " * 8]
    found = subquad("classify", run, given="".join(f"{line}\n" for line in lines))
    answers = [classes_of(line) for line in found.stdout.splitlines()]
    assert len(answers) == 3
    assert all(sum(answer.values()) == pytest.approx(100, abs=0.2) for answer in answers)
    assert next(iter(answers[0])) == "pos"
    assert next(iter(answers[2])) == "neg"
    assert "1 lines were cut at 6 tokens" in found.stderr
    loaded = load_run(run)
    expected = loaded.classify(*lines)
    for line, answer in zip(lines, answers, strict=True):
        assert answer == pytest.approx({label: 100 * value for label, value in expected[line]}, abs=0.051)


def test_classify_reads_a_text_from_every_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a fine\nand good film\n")
    found = subquad("classify", run, tmp_path / "a.txt", tmp_path / "gone.txt", tmp_path, code=1)
    (line,) = found.stdout.splitlines()
    assert line.startswith(f"{tmp_path / 'a.txt'}: pos")
    assert "gone.txt: there is no such file" in found.stderr
    assert "is a folder; give the files in it" in found.stderr
    assert "2 of 3 files could not be classified" in found.stderr
    by_path = load_run(run).classify(tmp_path / "a.txt")
    assert list(by_path) == [str(tmp_path / "a.txt")]
    assert classes_of(line) == pytest.approx({name: 100 * p for name, p in by_path[str(tmp_path / "a.txt")]}, abs=0.051)


def test_what_was_exported_is_imported_as_the_same_run(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    subquad("export", run, "--to", "huggingface", "--out", tmp_path / "exported")
    assert str(run.parent) not in (tmp_path / "exported" / "recipe.yaml").read_text(), "no paths of this machine"
    assert "text-classification model" in subquad("import", tmp_path / "exported", "--out", tmp_path / "again").stdout
    texts = ["good film", "bad film", "bad " * 8]
    assert load_run(tmp_path / "again").classify(*texts) == load_run(run).classify(*texts)
    refused = subquad("evaluate", tmp_path / "again", code=1, cwd=tmp_path).stderr
    assert 'give it some, as in "data.splits.test=FILE_OR_FOLDER"' in refused
    table = write_table(tmp_path / "more.tsv", SAMPLES)
    subquad("evaluate", tmp_path / "again", f"data.splits.test={table}")
    further = [f"data.splits.{split}={table}" for split in ("train", "valid", "test")]
    subquad("train", tmp_path / "again" / "recipe.yaml", "--out", tmp_path / "again", "train.updates=22", *further)
    assert load_run(tmp_path / "again").updates == 22


@pytest.mark.parametrize("missing", ["recipe.yaml", "inputs.json", "config.json"])
def test_other_folders_are_not_imported(missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in {"config.json", "model.safetensors", "recipe.yaml", "inputs.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    words = ["import", str(tmp_path), "--out", str(tmp_path / "run")]
    assert command(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"it holds no {missing}" in error
    (tmp_path / missing).write_text("{}")
    assert command(words) == 1
    assert "of another kind of model" in capsys.readouterr().err


def test_an_export_to_torch_is_checked_and_says_how_texts_begin(run: Path, tmp_path: Path) -> None:
    subquad("export", run, "--to", "torch", "--out", tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "begins with the token that ends texts" in card
    assert json.loads((tmp_path / "exported" / "inputs.json").read_text())["classes"] == ["neg", "pos"]


COMPARED = ["--mixers", "softmax,lightconv", "--seeds", "1", "--lengths", "16", "--rounds", "2"]


def test_a_comparison_is_planned(run: Path, tmp_path: Path) -> None:
    words = [*COMPARED, "--out", str(tmp_path / "compared"), "--dry-run"]
    shown = subquad("compare", run.parent / "reviews.yaml", *words).stdout
    assert "lightconv" in shown
    assert not (tmp_path / "compared" / "result.json").exists()


@pytest.mark.nightly
def test_a_comparison_with_floors_and_costs(run: Path, tmp_path: Path) -> None:
    changes = ["train.updates=3", "train.validate_every=3"]
    subquad("compare", run.parent / "reviews.yaml", *COMPARED, "--out", tmp_path / "compared", *changes)
    result = json.loads((tmp_path / "compared" / "result.json").read_text())
    assert {trial["mechanism"] for trial in result["trials"] if trial["status"] == "done"} >= {"softmax", "lightconv"}
    assert {floor["name"] for floor in result["floors"]} == {"majority class", "linear probe"}
    assert (tmp_path / "compared" / "report.html").is_file()
