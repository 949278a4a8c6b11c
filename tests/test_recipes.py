"""The recipes of the package: found by name from any folder, listed, searched and copied."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from subquad.cli.main import run
from subquad.compare.study import read_recipes
from subquad.recipes import FOLDER, entries, find_folder, find_recipe, names, short_names
from subquad.train.recipe import read_recipe
from tools.recipe_index import describe_recipe


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", names())
def test_every_name_leads_to_its_file(name: str) -> None:
    assert find_recipe(name) == find_recipe(short_names()[name]) == FOLDER / f"{name}.yaml"


@pytest.mark.parametrize("name", names())
def test_the_index_is_current(name: str) -> None:
    (entry,) = [entry for entry in entries() if entry.name == short_names()[name]]
    assert asdict(entry) == asdict(describe_recipe(name)), "run `make docs`, or python -m tools.recipe_index"


def test_the_index_has_nothing_else() -> None:
    assert [entry.name for entry in entries()] == list(short_names().values())


def test_a_recipe_is_trained_by_its_name(elsewhere: Path) -> None:
    pytest.importorskip("babel")
    small = ["data.options={train: 20, valid: 4, test: 4}", "train.updates=1", "schedule.warmup_updates=1"]
    assert run(["train", "phrases", *small]) == 0
    assert (elsewhere / "runs/phrases/recipe.yaml").is_file()


def test_a_file_is_preferred_to_a_recipe_of_its_name(elsewhere: Path) -> None:
    (elsewhere / "digits").write_text((FOLDER / "small/phrases.yaml").read_text())
    assert read_recipe("digits").task == "translation"
    (elsewhere / "phrases").mkdir()  # a folder is no recipe
    assert read_recipe("phrases").task == "translation"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("phrasess", "there is no recipe phrasess; did you mean 'phrases'"),
        ("wmt16_en_de", "did you mean 'wmt16_en_de_dynamicconv' or 'wmt16_en_de_lightconv' or "),
        ("recipes/small/phrases.yaml", "did you mean 'phrases'"),
        ("listops", "several recipes are called listops: say long/listops or small/listops"),
        ("zzzz", "there is no recipe zzzz. The path starts at the current folder"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", word]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_of_recipes_has_a_name(elsewhere: Path) -> None:
    assert set(read_recipes("long", [])) == {path.stem for path in (FOLDER / "long").glob("*.yaml")}
    (elsewhere / "long").mkdir()
    assert find_folder("long") == FOLDER / "long"  # an empty folder of that name does not hide it
    (elsewhere / "long/own.yaml").write_text((FOLDER / "small/phrases.yaml").read_text())
    assert list(read_recipes("long", [])) == ["own"]
    assert find_folder(".") == Path()
    assert find_folder("phrases") is None


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert run(["recipes", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_recipes_are_listed_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(listed(capsys)) == len(names())
    found = {str(entry["name"]): entry for entry in listed(capsys, "DynamicConv")}
    assert {"wmt16_en_de_dynamicconv", "multi30k_dynamicconv"} <= found.keys()
    assert "phrases" not in found
    entry = found["wmt16_en_de_dynamicconv"]
    assert entry["mechanisms"] == ["dynamicconv", "softmax"]
    assert (entry["task"], entry["data"]) == ("translation", "data/wmt16_en_de")
    assert (entry["parameters"], entry["origin"]) == (213_237_760, "pay_less_attention_paper")
    assert run(["recipes", "multi30k"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "task", "mechanisms", "data", "parameters", "from"]
    assert [row.split()[0] for row in rows[:3]] == ["multi30k_dynamicconv", "multi30k_lightconv", "multi30k_softmax"]
    assert run(["recipes", "zzzz"]) == 1
    assert "no recipe has the word 'zzzz'" in capsys.readouterr().err


def test_a_recipe_is_copied_once(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--copy", "phrases"]) == 0
    assert (elsewhere / "phrases.yaml").read_bytes() == (FOLDER / "small/phrases.yaml").read_bytes()
    assert "`subquad train phrases.yaml` trains it" in capsys.readouterr().out
    assert run(["recipes", "--copy", "phrases"]) == 1
    assert "phrases.yaml exists already; give another file with --out" in capsys.readouterr().err
    assert run(["recipes", "--copy", "digits", "--out", "some/mine.yaml"]) == 0
    assert (elsewhere / "some" / "mine.yaml").is_file(), "also in a new folder, which can be compared as a whole"


def test_one_thing_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "lara", "--copy", "phrases"]) == 1
    assert "not several of them" in capsys.readouterr().err
