"""Recall: only chosen positions count, for the loss, the metric and the floors; from generated sets and from files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from subquad.cli.main import run as command
from subquad.data.builtin.recall import NOTHING, RecallSplit
from subquad.models import LanguageModel, build_from_config
from subquad.tasks.recall import RecallData, RecallTask, right_answers
from subquad.train.run import load_trained

TEXT = {  # of the second sample nothing is asked, and the third is shorter
    "train": ["a x b y a b\t_ _ _ _ x y", "b b b b b b\t_ _ _ _ _ _", "a y a\t_ _ y"],
    "valid": ["a y a\t_ _ y"],
    "test": ["b x b x\t_ _ x _", "a y a x a y\t_ _ y _ _ x", "c y a\t_ _ z"],  # c and z were never seen
}


def write_tables(folder: Path, lines: dict[str, list[str]] = TEXT, suffix: str = "tsv") -> dict[str, str]:
    paths = {split: folder / f"{split}.{suffix}" for split in lines}
    for split, path in paths.items():
        text = "".join(f"{line}\n" for line in lines[split])
        path.write_text(text.replace("\t", ",") if suffix == "csv" else text)
    return {split: str(path) for split, path in paths.items()}


def opened(data: dict[str, Any]) -> tuple[RecallTask, RecallData]:
    config = RecallData.parse("data", data)
    return RecallTask.open(config, Path("unused")), config


def tiny(vocab: int, mixer: Any = "softmax", **embedding: Any) -> dict[str, Any]:
    stack = {"layers": 2, "heads": 2, "ffn_dim": 64, "norm": "pre", "mixer": mixer}
    return {"kind": "language-model", "vocab": vocab, "dim": 32, "embedding": embedding, "decoder": stack}


# ---------------------------------------------------------------------- samples


@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_tables_become_batches(tmp_path: Path, suffix: str) -> None:
    task, _ = opened({"splits": write_tables(tmp_path, suffix=suffix)})
    batch = task.samples("train", training=True).batch(np.array([0, 2]))
    words, pad = task.tokenizer, task.tokenizer.pad
    assert batch["inputs"].tolist() == [words.encode("a x b y a b"), [*words.encode("a y a"), pad, pad, pad]]
    assert batch["targets"].tolist() == [[pad] * 4 + words.encode("x y"), [pad, pad, *words.encode("y"), pad, pad, pad]]
    assert task.data_dependent_model_config() == {"vocab": 4 + 4, "embedding": {"pad": pad}, "answers": 2}
    assert [sizes.tolist() for sizes in task.samples("train", training=True).sizes] == [[6, 6, 3]]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    plain, _ = opened({"splits": write_tables(tmp_path)})
    rows = {split: [line.split("\t") for line in lines] for split, lines in TEXT.items()}
    for split, lines in rows.items():
        content = "".join(json.dumps({"targets": targets, "n": 1, "text": text}) + "\n" for text, targets in lines)
        (tmp_path / f"{split}.jsonl").write_text(content)
        named = "".join(f"{text},{targets}\n" for text, targets in [("text", "targets"), *lines])
        (tmp_path / f"{split}.csv").write_text(named)
    for suffix in ("jsonl", "csv"):
        task, _ = opened({"splits": {split: str(tmp_path / f"{split}.{suffix}") for split in rows}})
        for split in rows:
            numbers = np.arange(len(rows[split]))
            one, other = (found.samples(split, training=False).batch(numbers) for found in (plain, task))
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a b\t_ a", "a b c\t_ a"], r"train.tsv, line 2: 3 symbols of text and 2 targets"),
        (["a b\t_ a", " \t "], r"train.tsv, line 2: there are no symbols"),
        (["a b\t_ _"], r"train.tsv: nothing is asked"),
        (["a b"], r"line 1: there is no column 2"),
        (["text\ttargets", "a b\t_ a", "a b\t_"], r"train.tsv, line 3: 2 symbols of text and 1 targets"),
    ],
)
def test_wrong_samples_are_named(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        opened({"splits": write_tables(tmp_path, {**TEXT, "train": lines})})


def test_lines_are_counted_below_a_header(tmp_path: Path) -> None:
    lines = ["targets,id,text", "_ a,1,a b", "_ a,2,a b c"]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    split = {"files": [str(tmp_path / "train.csv")], "columns": ["text", "targets"]}
    with pytest.raises(ValueError, match=r"train.csv, line 3: 3 symbols of text and 2 targets"):
        opened({"splits": {"train": split, "valid": split}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give one of embedded and splits"),
        ({"embedded": "fuzzy_recall", "splits": {"train": "a", "valid": "b"}}, "give one of embedded and splits"),
        ({"splits": {"train": "a"}}, "splits need `train` and `valid`"),
        ({"embedded": "fuzzy_recal"}, "did you mean 'fuzzy_recall'"),
        ({"embedded": "associative_recall", "options": {"pair": 3}}, "did you mean 'pairs'"),
        ({"embedded": "speeches"}, "holds text; task recall needs recall"),
    ],
)
def test_wrong_data_is_refused_before_anything_is_read(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecallData.parse("data", data)


def test_generated_symbols_become_token_ids() -> None:
    options = {"length": 20, "pairs": 2, "vocab": 12, "train": 5}
    task, config = opened({"embedded": "associative_recall", "options": options})
    batch = task.samples("train", training=True).batch(np.array([3]))
    inputs, targets = RecallSplit(config.generator(), "train")[3]
    assert task.tokenizer.decode(batch["inputs"][0]) == " ".join(map(str, inputs))
    assert task.tokenizer.decode(batch["targets"][0]).split() == [str(one) for one in targets if one != NOTHING]
    assert (batch["targets"][0].numpy() == task.pad).tolist() == (targets == NOTHING).tolist()
    assert RecallTask.expected_model_config(config) == {"vocab": 16}
    assert task.data_dependent_model_config()["answers"] == 6


# ---------------------------------------------------------------------- loss and metric


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    made = build_from_config(tiny(9))
    assert isinstance(made, LanguageModel)
    return made.eval()


def test_only_chosen_positions_count(model: LanguageModel) -> None:
    inputs = torch.randint(2, 9, (3, 7))
    targets = torch.full_like(inputs, 1)
    targets[0, 2], targets[2, 6], targets[2, 0] = 5, 4, 8
    loss, _ = RecallTask.model_loss(model, {"inputs": inputs, "targets": targets}, pad=1)
    log_probs = model(inputs).logits.log_softmax(-1)
    expected = -(log_probs[0, 2, 5] + log_probs[2, 6, 4] + log_probs[2, 0, 8])
    assert loss.count == 3
    torch.testing.assert_close(loss.total, expected)
    # what is read after the last asked position changes nothing
    inputs[0, 3:] = 2
    loss, _ = RecallTask.model_loss(model, {"inputs": inputs, "targets": targets}, pad=1)
    torch.testing.assert_close(loss.total, expected)


def test_right_answers_are_counted_where_they_are_asked(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randint(2, 9, (4, 6))
    best = model(inputs).logits.argmax(-1)
    targets = best.clone()
    targets[1] = (best[1] + 1) % 9  # all wrong
    targets[2, ::2] = 1  # not asked, whatever the model says
    expected = (targets == best) & (targets != 1)
    features = model.features(inputs)[0]
    assert torch.equal(right_answers(model, features, targets, 1), expected)
    monkeypatch.setattr("subquad.tasks.recall.chunk_rows", lambda vocab, device: 4)
    assert torch.equal(right_answers(model, features, targets, 1), expected), "in chunks of four positions"
    with torch.no_grad():
        loss, _ = RecallTask.model_loss(model, {"inputs": inputs, "targets": targets}, pad=1)
    assert int(loss.sums["accuracy"]) == int(expected.sum())


def test_floors_by_hand(tmp_path: Path) -> None:
    task, config = opened({"splits": write_tables(tmp_path)})
    floors = {floor.name: floor for floor in task.floors(config, "test")}
    # Training asks for x, y and y. The test asks for x (at b, after x), y (at a, after y), x (at y, after y and x) and
    # z, which training never has.
    assert floors["most frequent answer"].value == pytest.approx(100 * 1 / 4)
    assert floors["any answer in the sample"].value == pytest.approx(100 * (1 + 1 + 1 / 2 + 0) / 4)
    assert floors["answer by symbol"].kind == "linear"
    assert all(floor.how.endswith(".") for floor in floors.values())


def test_chance_is_that_of_guessing_an_answer() -> None:
    few = RecallTask.chance_level({"vocab": 100, "answers": 4}, 100)
    assert few == pytest.approx(100 * (0.25 + 2 * np.sqrt(0.25 * 0.75 / 100)))
    assert 25 < RecallTask.chance_level({"vocab": 100, "answers": 4}, 10**6) < 25.1


def test_random_batches_ask_for_something(model: LanguageModel) -> None:
    batch = RecallTask.random_batch(model, 2, 20, torch.Generator().manual_seed(0))
    loss, _ = RecallTask.model_loss(model, batch)
    assert batch["inputs"].shape == (2, 20)
    assert 0 < loss.count < 40


# ---------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe for the tables of a user, in which a symbol is followed by the one that was before it."""
    folder = tmp_path_factory.mktemp("recall")
    lines = [f"{a} {b} {a}\t_ {a} {b}" for a in "abcd" for b in "wxyz"] * 4
    splits = write_tables(folder, {"train": lines, "valid": lines, "test": [*lines, "a b c\t_ _ _"]})
    recipe = {
        "task": "recall",
        "data": {"splits": splits},
        "model": tiny(12),
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 40, "validate_every": 40, "budget": {"max_tokens": 192}},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_a_users_tables_are_trained_and_evaluated(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = files / "run"
    assert command(["train", str(files / "own.yaml"), "--dry-run"]) == 0
    assert command(["train", str(files / "own.yaml"), "--out", str(run)]) == 0
    assert command(["evaluate", str(run)]) == 0
    found = json.loads((run / "evaluation-test.json").read_text())
    assert (found["task"], found["samples"], found["lost"]) == ("recall", 65, 0)
    assert found["counts"] == {"asked": 128, "tokens": 195}
    assert found["metrics"]["accuracy"]["value"] == 1.0
    with torch.inference_mode():
        model, words = (loaded := load_trained(run)).model, loaded.tokenizer("text")
        said = model(torch.tensor([words.encode("c y c")])).logits.argmax(-1)
    assert words.decode(said[0, 1:]) == "c y"
    assert command(["evaluate", str(run), "--split", "tset"]) == 1
    assert "did you mean 'test'" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["torch", "onnx", "huggingface"])
def test_models_of_recall_are_exported(files: Path, form: str) -> None:
    run = files / "exported"
    assert command(["train", str(files / "own.yaml"), "--out", str(run)]) == 0
    assert command(["export", str(run), "--to", form, "--out", str(files / form)]) == 0
