"""Studies: one recipe at several lengths, several recipes in a folder, and one table of all of them."""

from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad.cli.main import run as command
from subquad.compare.report.result import read_result
from subquad.compare.report.study import decision_map, read_study, study_tables
from subquad.compare.study import options_at, plan_study, recipe_at
from subquad.compare.variants import applicable
from subquad.mixers import available
from subquad.recipes import FOLDER
from subquad.train.recipe import read_recipe
from tests.compare.plans import PAIRS

ROOT = Path(__file__).parents[2]
PIXELS = "digits_pixels"
LONG = {path.stem: path for path in sorted((FOLDER / "long").glob("*.yaml"))}
TINY = [
    "model.dim=8",
    "train.updates=2",
    "schedule.warmup_updates=0",
    "data.options.train=16",
    "data.options.valid=8",
    "data.options.test=8",
]


@pytest.mark.parametrize("length", [64, 1024, 16384])
@pytest.mark.parametrize("name", LONG)
def test_the_long_recipes_have_any_length(name: str, length: int) -> None:
    """As many tokens in an update as at the recipe's own length, or one sample."""
    recipe = recipe_at(read_recipe(LONG[name]), length)
    batch, tokens = recipe.task_class.typical_batch(recipe.data, recipe.train.budget)
    assert tokens == (None if name == "pixels" else length), "images have pixels"
    assert batch * length == 16384
    if name == "pixels":
        assert recipe.model_dump()["data"]["options"]["size"] ** 2 == length


def test_a_batch_of_samples_becomes_one_of_as_many_tokens() -> None:
    changes = ["data.options.length=64", "train.budget.max_sentences=32"]
    recipe = recipe_at(read_recipe("small/associative_recall", changes), 256)
    assert (recipe.train.budget.max_tokens, recipe.train.budget.max_sentences) == (32 * 64, None)


def test_tables_are_long_enough() -> None:
    learned = ["model.embedding.positions=learned", "model.embedding.max_length=1024", "model.decoder.mixer=primal"]
    model = recipe_at(read_recipe(LONG["speeches"], learned), 4096).model
    assert model["embedding"]["max_length"] == 4096
    assert model["decoder"]["mixer"]["max_length"] == 4096
    given = options_at(["eva", "short=linformer", "primal"], {"short": {"max_length": 600}}, 2000)
    assert given == {"short": {"max_length": 600}, "primal": {"max_length": 2000}}, "what was set stays"


def test_a_sample_longer_than_an_update_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an update of this recipe has 16,384 tokens.*max_tokens=20000 or more"):
        recipe_at(read_recipe(LONG["speeches"]), 20000)


def test_what_has_lengths_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="samples of the task translation have lengths of their own"):
        recipe_at(PAIRS, 100)
    with pytest.raises(ValueError, match="images are squares of patches: 1000 is none, 961 and 1024 are"):
        recipe_at(read_recipe(PIXELS), 1000)
    with pytest.raises(ValueError, match="an image of 1,024 patches has more pixels than a batch"):
        recipe_at(read_recipe(PIXELS, ["train.budget.max_sentences=3"]), 1024)
    with pytest.raises(ValueError, match="the stages of a pyramid read sequences of different lengths"):
        recipe_at(read_recipe("imagenet_pvt_v2_b3_eva"), 196)


def test_images_have_as_many_patches_and_batches_as_many_pixels() -> None:
    pixels = recipe_at(read_recipe(PIXELS), 1024)
    assert pixels.model_dump()["data"]["options"] == {"size": 32}
    assert pixels.train.budget.max_sentences == 32 // 4
    patches = recipe_at(read_recipe("cifar10_eva"), 256)
    assert patches.model_dump()["data"]["augment"]["size"] == 64
    assert patches.train.budget.max_sentences == 16


def test_all_means_what_the_model_can_have() -> None:
    causal = applicable(read_recipe(LONG["speeches"]), available())
    assert "eva" in causal
    assert not {"lara", "linformer", "ra"} & set(causal)
    assert applicable(PAIRS, available()) == available(), "an encoder has room for all"
    planned = plan_study(
        {name: read_recipe(path) for name, path in LONG.items()}, available(), [64], only_applicable=True
    )
    found = {one.part.recipe: "lara" in one.mixers for one in planned}
    assert found == {name: name in ("pixels", "listops") for name in LONG}


@pytest.mark.usefixtures("preloaded_programs")
def test_a_folder_of_recipes_at_two_lengths_ends_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes, out = tmp_path / "recipes", tmp_path / "out"
    recipes.mkdir()
    for name in ("selective_copying", "associative_recall"):
        text = LONG[name].read_text().replace("copied: 16", "copied: 2").replace("pairs: 16", "pairs: 2")
        (recipes / f"{name}.yaml").write_text(text)
    words = ["--mixers", "lightconv", "--quality-lengths", "16,32", "--seeds", "1", "--rounds", "1", "--no-floors"]
    asked = ["compare", str(recipes), *TINY, "train.budget.max_tokens=64", *words, "--out", str(out)]
    assert command(asked) == 0
    shown = capsys.readouterr().out
    assert "What to take" in shown
    study = read_study(out)
    assert [part.folder for part in study.parts] == [
        "associative_recall-16",
        "associative_recall-32",
        "selective_copying-16",
        "selective_copying-32",
    ]
    results = study.results(out)
    quality = study_tables(results)["Quality"]
    assert quality.headers == ["task", "softmax", "lightconv"], "more tasks than mechanisms are rows"
    assert [row[0] for row in quality.rows] == [part.title for part in study.parts]
    assert all(cell.count("%") == 1 for row in quality.rows for cell in row[1:])
    one = study_tables(dict(list(results.items())[:1]))["Quality"]
    assert (one.headers, [row[0] for row in one.rows]) == (
        ["mechanism", "associative_recall, 16 tokens"],
        ["softmax", "lightconv"],
    )
    assert one.rows[1][1] == quality.rows[0][2]
    lengths = [result.task_lengths for result in results.values()]
    assert lengths == [[16], [32], [16], [32]], "quality and costs are of the same length"
    assert all(row[1:3] == ["", ""] for row in decision_map(results).rows), "one seed decides nothing"
    page = (out / "study.html").read_text()
    assert all(f'href="{part.folder}/report.html"' in page for part in study.parts)
    assert all((out / part.folder / "report.html").exists() for part in study.parts)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("trial.json")}
    assert command(asked) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("trial.json")} == before, "nothing is trained twice"
    assert read_result(out / "selective_copying-16" / "result.json").trials[0].status == "done"
    (out / "study.html").unlink()
    assert command(["compare", str(recipes), "--merge", "--out", str(out)]) == 0
    assert (out / "study.html").read_text().count("report.html") == page.count("report.html")


@pytest.mark.usefixtures("preloaded_programs")
def test_a_later_call_adds_lengths(tmp_path: Path) -> None:
    """In Python, with sections of the recipe as in `subquad.compare`."""
    small: Any = {"model": {"dim": 8}, "train": {"updates": 2}, "schedule": {"warmup_updates": 0}, "floors": False}
    small |= {"data": {"options": {"pairs": 2, "valid": 8, "test": 8}}, "seeds": 1, "rounds": [1], "quiet": True}
    for length in (32, 16):
        results = subquad.study(
            "small/associative_recall", ["softmax"], quality_lengths=[length], out=tmp_path, **small
        )
    assert list(results) == ["associative_recall, 16 tokens", "associative_recall, 32 tokens"]
    assert [len(result.trials) for result in results.values()] == [1, 1]
    with pytest.raises(ValueError, match=r"several lengths are several comparisons: subquad\.study"):
        subquad.compare("small/associative_recall", ["softmax"], quality_lengths=[16, 32])
