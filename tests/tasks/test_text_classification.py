"""Text classification: from tables and folders to batches, cut texts, evaluation, floors, and what is refused."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from subquad.cli.main import run as command
from subquad.data.batches import BatchPlan, Budget
from subquad.models import TextClassifier, build_model
from subquad.tasks.base import Floor
from subquad.tasks.text_classification import TextClassificationData, TextClassificationTask
from subquad.train.recipe import Recipe
from subquad.train.run import build_task, evaluate_run, load_trained

GOOD, BAD = ["good film", "a fine and good film", "good"], ["bad film", "a bad and dull film", "bad, very bad indeed"]
SAMPLES = [("pos", text) for text in GOOD] + [("neg", text) for text in BAD]
STACK = {"layers": 1, "heads": 2, "ffn_dim": 16, "norm": "pre"}


def write_table(path: Path, samples: list[tuple[str, str]]) -> str:
    """A table of labels and texts, in the format that the name of the file says."""
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps({"label": label, "text": text}) + "\n" for label, text in samples)
        else:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(samples)
    return str(path)


def write_folder(folder: Path, samples: list[tuple[str, str]]) -> str:
    for number, (label, text) in enumerate(samples):
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{number:03}.txt").write_text(text + "\n")
    return str(folder)


def recipe_data(splits: dict[str, Any], tokenizer: str = "words", **data: Any) -> dict[str, Any]:
    options = {"vocab_size": 280} if tokenizer == "bpe" else {}
    return {
        "task": "text-classification",
        "data": {"splits": splits, "tokenizer": {"kind": tokenizer, **options}, **data},
        "model": {"preset": "text_small", "dim": 16, "encoder": STACK},
        "optim": {"name": "adam"},
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 20, "budget": {"max_tokens": 64}, "validate_every": 20},
    }


def task_of(tmp_path: Path, samples: list[tuple[str, str]] = SAMPLES, **options: Any) -> TextClassificationTask:
    path = write_table(tmp_path / "all.tsv", samples)
    given = recipe_data(dict.fromkeys(("train", "valid", "test"), path), **options)
    task = build_task(Recipe.parse("recipe", given), tmp_path / "data")
    assert isinstance(task, TextClassificationTask)
    return task


# ---------------------------------------------------------------------- data


@pytest.mark.parametrize("form", ["all.tsv", "all.csv", "all.jsonl", "folder"])
@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe"])
def test_every_form_of_data_gives_the_same_samples(form: str, tokenizer: str, tmp_path: Path) -> None:
    samples = sorted(SAMPLES, key=lambda sample: sample[0])
    path = write_folder(tmp_path / form, samples) if form == "folder" else write_table(tmp_path / form, samples)
    given = recipe_data({"train": path, "valid": path}, tokenizer)
    task = build_task(Recipe.parse("recipe", given), tmp_path / "data")
    assert isinstance(task, TextClassificationTask)
    assert task.inputs() == {"classes": ["neg", "pos"]}
    found = task.samples("train", training=True)
    batch = found.batch(np.arange(len(samples)))
    assert batch["labels"].tolist() == [0, 0, 0, 1, 1, 1]
    for row, padding, (_, text) in zip(batch["tokens"], batch["padding"], samples, strict=True):
        tokens = row[~padding].tolist()
        assert tokens[0] == task.tokenizer.eos
        assert task.tokenizer.decode(tokens[1:]) == text
        assert (row[padding] == task.tokenizer.pad).all()
    assert found.sizes[0].tolist() == (~batch["padding"]).sum(1).tolist()
    config = task.data_dependent_model_config()
    assert (config["num_classes"], config["vocab"]) == (2, task.tokenizer.size)


def test_batches_have_texts_of_similar_length(tmp_path: Path) -> None:
    samples = [(str(number % 2), "word " * number) for number in range(1, 60)]
    found = task_of(tmp_path, samples).samples("train", training=True)
    for numbers in BatchPlan(*found.sizes, budget=Budget(max_tokens=200)).epoch(0):
        batch = found.batch(numbers)
        assert batch["tokens"].numel() <= 200
        assert batch["labels"].tolist() == [(number + 1) % 2 for number in numbers]


def test_long_texts_are_skipped_or_cut_and_counted(tmp_path: Path) -> None:
    for name in ("skip", "cut"):
        (tmp_path / name).mkdir()
    skipping = task_of(tmp_path / "skip", max_length=3)
    assert skipping.notes()["train"] == "samples skipped: 3 over-long"
    assert len(skipping.samples("train", training=True)) == 3
    cutting = task_of(tmp_path / "cut", [*SAMPLES, ("pos", "")], max_length=3, long_texts="cut")
    assert cutting.notes()["train"] == "samples skipped: 1 empty; 3 of 6 texts cut to their first 3 tokens"
    samples = cutting.samples("train", training=True)
    assert samples.sizes[0].tolist() == [3, 4, 2, 3, 4, 4]
    tokens = samples.batch(np.array([1]))["tokens"][0].tolist()
    assert cutting.tokenizer.decode(tokens[1:]) == "a fine and"


def test_a_folder_of_prepared_text_is_read_as_well(tmp_path: Path) -> None:
    table = write_table(tmp_path / "all.tsv", SAMPLES)
    words = ["--samples", "labelled", "--train", table, "--valid", table, "--tokenizer", "words"]
    assert command(["data", "prepare", str(tmp_path / "prepared"), *words]) == 0
    given = recipe_data({})
    given["data"] = {"folder": str(tmp_path / "prepared"), "max_length": 2, "long_texts": "cut"}
    task = build_task(Recipe.parse("recipe", given), tmp_path / "data")
    assert task.notes()["train"] == "3 of 6 texts cut to their first 2 tokens"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"long_texts": "cut"}, "long_texts: cut needs max_length"),
        ({"long_texts": "cutt", "max_length": 3}, "long_texts"),
        ({"fairseq": "data-bin", "splits": {}, "tokenizer": {}}, "fairseq-preprocess has no labels"),
        ({"embedded": "digits", "splits": {}}, "holds images; task text-classification needs labelled"),
        ({"masking": {}}, "data.masking has no meaning for task text-classification"),
        ({"splits": {"train": "missing.tsv", "valid": "missing.tsv"}}, r"missing.tsv: there is no such file"),
    ],
)
def test_mistakes_are_one_clear_line(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = recipe_data({"train": "missing.tsv", "valid": "missing.tsv"})
    given["data"] |= data
    with pytest.raises(ValueError, match=message) as caught:
        build_task(Recipe.parse("recipe", given), tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_labels_that_training_does_not_know_are_refused_by_name(tmp_path: Path) -> None:
    train, valid = write_table(tmp_path / "a.tsv", SAMPLES), write_table(tmp_path / "b.tsv", [("poss", "good")])
    with pytest.raises(ValueError, match="no class is called 'poss'; did you mean 'pos'"):
        build_task(Recipe.parse("recipe", recipe_data({"train": train, "valid": valid})), tmp_path / "data")
    with pytest.raises(ValueError, match="all training texts have the label 'pos'"):
        task_of(tmp_path, [("pos", "good"), ("pos", "fine")])


# ---------------------------------------------------------------------- loss


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_the_loss_of_a_batch_is_that_of_its_texts_one_by_one(pooling: str, tmp_path: Path) -> None:
    task = task_of(tmp_path)
    model = build_model("text_small", dim=16, pooling=pooling, encoder=STACK, **task.data_dependent_model_config())
    samples = task.samples("train", training=True)
    together = task.loss(model.eval(), samples.batch(np.arange(6)))
    single = [task.loss(model, samples.batch(np.array([number]))) for number in range(6)]
    torch.testing.assert_close(together.total, sum(found.total for found in single))
    assert together.count == 6
    assert together.sums["top1"] == sum(found.sums["top1"] for found in single)
    assert "top5" not in together.sums
    task.smoothing = 0.2
    smooth = task.loss(model, samples.batch(np.arange(6)))
    assert smooth.total != together.total
    torch.testing.assert_close(smooth.nll, together.nll)


def test_random_batches_have_the_asked_shape(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    model = build_model("text_small", dim=16, encoder=STACK, **task.data_dependent_model_config())
    assert isinstance(model, TextClassifier)
    batch = task.random_batch(model, 3, 50, torch.Generator().manual_seed(0))
    assert batch["tokens"].shape == (3, 50)
    loss, _ = task.model_loss(model, batch)
    assert loss.count == 3
    assert loss.total.isfinite()


# ---------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    train = write_table(folder / "train.tsv", SAMPLES * 4)
    test = write_table(folder / "test.tsv", [*SAMPLES, ("neg", ""), ("pos", "good " * 40)])
    given = recipe_data({"train": train, "valid": train, "test": test}, max_length=6, long_texts="cut")
    (folder / "reviews.yaml").write_text(yaml.safe_dump(given))
    assert command(["train", str(folder / "reviews.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_evaluation_counts_every_text_as_the_model_answers_it(run: Path) -> None:
    loaded = load_trained(run)
    assert isinstance(loaded.model, TextClassifier)
    found = evaluate_run(loaded, "test")
    tokenizer, classes = loaded.tokenizer("text"), loaded.inputs["classes"]
    right = []
    for label, text in [*SAMPLES, ("neg", ""), ("pos", "good " * 40)]:
        tokens = [tokenizer.eos, *tokenizer.encode(text)[:6]]
        with torch.no_grad():
            right.append(classes[int(loaded.model(torch.tensor([tokens])).logits.argmax())] == label)
    assert found.measures["top1"].statistics[:, 0].tolist() == right
    assert set(found.measures) == {"top1"}
    assert (found.samples, found.lost, found.counts["cut"]) == (8, 0, 1)
    assert found.measures["top1"].value > 0.7, "good and bad are enough to tell them apart"
    low, high = (getattr(found.estimates(100)["top1"], bound) for bound in ("low", "high"))
    assert low <= found.measures["top1"].value <= high


def test_the_chance_level_and_the_main_metric_are_those_of_images(run: Path) -> None:
    task = load_trained(run).recipe.task_class
    assert task.main_metric.key == "top1"
    assert task.chance_level({"num_classes": 2}, 10_000) == pytest.approx(51)


def floors_of(task: TextClassificationTask, path: Path) -> dict[str, Floor]:
    data = recipe_data(dict.fromkeys(("train", "test"), str(path)))["data"]
    return {floor.name: floor for floor in task.floors(TextClassificationData.parse("data", data), "test")}


def test_floors_are_the_majority_and_a_linear_model_of_counts(tmp_path: Path) -> None:
    samples = [("a", "x y"), ("b", "y z"), ("a", "x x y"), ("a", "y x"), ("b", "z y z")] * 8
    task = task_of(tmp_path, samples)
    floors = floors_of(task, tmp_path / "all.tsv")
    most = Counter(label for label, _ in samples).most_common(1)[0][1]
    assert floors["majority class"].value == pytest.approx(100 * most / len(samples))
    assert floors["linear probe"].value == 100, "the counts of x and z tell the classes apart"
    assert "texts of test" in floors["linear probe"].how
    (tmp_path / "order").mkdir()
    ordered = task_of(tmp_path / "order", [("a", "x y"), ("b", "y x")] * 20)
    floors = floors_of(ordered, tmp_path / "order" / "all.tsv")
    assert floors["linear probe"].value == 50, "counts do not know the order"


def test_listops_is_prepared_once_and_streamed(tmp_path: Path) -> None:
    given = recipe_data({})
    sizes = {"min_length": 16, "max_length": 32, "train": 40, "valid": 10, "test": 10}
    given["data"] = {"embedded": "listops", "options": sizes, "tokenizer": {"kind": "words"}}
    recipe = Recipe.parse("recipe", given)
    task = build_task(recipe, tmp_path)
    assert isinstance(task, TextClassificationTask)
    assert task.tokenizer.size <= 4 + 15, "special tokens, operators, a bracket and digits"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix in (".csv", ".tokens")}
    build_task(recipe, tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert isinstance(recipe.data, TextClassificationData)
    assert task.floors(recipe.data, "test")[0].name == "majority class"
    given["data"]["options"] = {**sizes, "seed": 5}
    build_task(Recipe.parse("recipe", given), tmp_path)
    assert (tmp_path / "train.csv").stat().st_mtime_ns != before[tmp_path / "train.csv"]


@pytest.mark.nightly
def test_listops_is_learned_by_attention_and_not_by_counting(tmp_path: Path) -> None:
    """The small recipe, shortened: attention finds the first operator, and a model without mixing cannot."""
    found = {}
    for mixer in ("softmax", "identity"):
        changes = [f"model.encoder.mixer={mixer}", "train.updates=300", "train.validate_every=300"]
        recipe = "small/listops"
        assert command(["train", str(recipe), *changes, "--out", str(tmp_path / mixer)]) == 0
        found[mixer] = evaluate_run(load_trained(tmp_path / mixer), "test").measures["top1"].value
    assert found["softmax"] > 0.3
    assert found["identity"] < 0.27
