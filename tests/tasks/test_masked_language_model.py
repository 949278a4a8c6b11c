"""Masked language models: which tokens are masked, training and evaluation, the official Linformer's checkpoints."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subquad.cli.main import run as command
from subquad.data.masking import Masking, MaskOptions
from subquad.models import MaskedLanguageModel
from subquad.tasks.masked_language_model import MaskedLanguageModelData, MaskedLanguageModelTask
from subquad.train.recipe import read_recipe
from subquad.train.run import build_task, load_trained
from tests.originals.files import FOLDER, OUTPUT_TOLERANCE, Fixture, assert_close, load
from tests.originals.hosts import roberta_arguments

SYMBOL = 99
PLAIN = np.arange(10, 60)


def masked(options: dict[str, float], rounds: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """What is read and where it is asked, of the same 50 tokens many times: (rounds, 50) both."""
    masking = Masking(MaskOptions(**options), SYMBOL, np.array([7, 8]))
    drawn = [masking.apply(PLAIN, np.random.default_rng([0, number])) for number in range(rounds)]
    read, asked = zip(*drawn, strict=True)
    return np.stack(read), np.stack(asked)


def test_shares_are_those_that_were_asked_for() -> None:
    read, asked = masked({"share": 0.25, "kept": 0.3, "random": 0.2})
    assert (read[~asked] == np.broadcast_to(PLAIN, read.shape)[~asked]).all()
    assert asked.mean() == pytest.approx(0.25, abs=1e-2)
    assert {12, 13} == set(asked.sum(1))  # a quarter of 50 is rounded both ways
    fates = read[asked]
    assert (fates == SYMBOL).mean() == pytest.approx(0.5, abs=0.03)
    assert np.isin(fates, [7, 8]).mean() == pytest.approx(0.2, abs=0.03)
    assert asked.mean(0).min() > 0.15, "every place is asked for"


def test_a_sample_always_asks_for_something() -> None:
    masking = Masking(MaskOptions(share=0.01, kept=0.0, random=0.0), SYMBOL, PLAIN)
    read, asked = masking.apply(np.array([5]), np.random.default_rng(0))
    assert asked.tolist() == [True]
    assert read.tolist() == [SYMBOL]


@pytest.mark.parametrize("options", [{"kept": 0.7, "random": 0.4}, {"share": 0.0}, {"kept": -0.1}])
def test_impossible_shares_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"kept|share"):
        MaskOptions.parse("masking", options)


# ---------------------------------------------------------------------- the task

WORDS = [f"w{number}" for number in range(12)]


def write_texts(folder: Path, lines: int = 60) -> dict[str, str]:
    """Lines that each repeat a word; files by split."""
    generator = np.random.default_rng(0)
    splits = {}
    for split in ("train", "valid", "test"):
        text = [" ".join([word] * 9) for word in generator.choice(WORDS, lines)]
        path = folder / f"{split}.txt"
        path.write_text("".join(f"{line}\n" for line in text))
        splits[split] = str(path)
    return splits


def write_recipe(folder: Path, **mixer: Any) -> Path:
    recipe = {
        "task": "masked-language-model",
        "data": {
            "splits": write_texts(folder),
            "tokenizer": {"kind": "words"},
            "blocks": {"tokens_per_sample": 32, "breaks": "eos"},
        },
        "model": {
            "preset": "masked_small",
            "dim": 32,
            "encoder": {"layers": 2, "heads": 2, "ffn_dim": 64, "dropout": 0.0, "mixer": mixer},
        },
        "schedule": {"kind": "constant", "lr": 3e-3},
        "train": {"updates": 90, "budget": {"max_tokens": 512}, "log_every": 45, "validate_every": 45},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


LINFORMER = {"name": "linformer", "proj_k": 32, "max_length": 32, "share_kv": True, "share_layers": True}


def test_the_data_is_looked_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path, **LINFORMER))
    assert command(["train", recipe, "--dry-run"]) == 0
    (tmp_path / "valid.txt").unlink()
    assert command(["train", recipe, "--dry-run"]) == 1
    assert "this cannot be trained: valid: missing:" in capsys.readouterr().err
    write_texts(tmp_path)
    with (tmp_path / "train.txt").open("a") as file:
        file.write(" ".join(WORDS) + "\n")
    assert command(["train", recipe, "--out", str(tmp_path / "run"), "data.max_length=9", "train.updates=1"]) == 0
    assert "train: samples skipped: 1 over-long" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    assert command(["train", str(write_recipe(folder, **LINFORMER)), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_what_is_hidden_is_found_from_what_is_around_it(run: Path) -> None:
    assert command(["evaluate", str(run), "--split", "test"]) == 0
    found = json.loads((run / "evaluation-test.json").read_text())
    assert found["metrics"]["ppl"]["value"] < 4, "of twelve words, those around tell which it is"
    assert 0.1 < found["counts"]["masked tokens"] / found["counts"]["tokens"] < 0.2


def test_evaluation_hides_the_same_and_training_others(run: Path) -> None:
    task = build_task(read_recipe(run / "recipe.yaml"), run / "data")
    assert isinstance(task, MaskedLanguageModelTask)
    samples = task.samples("valid", training=False)
    together, first = samples.batch(np.arange(4)), samples.batch(np.array([0]))
    size = int(samples.sizes[0][0])
    assert torch.equal(together["inputs"][0, :size], first["inputs"][0])
    assert not torch.equal(samples.batch(np.array([0]), seed=1)["inputs"], first["inputs"])
    assert size == 11, "beginning, nine words, end"
    assert first["inputs"][0, 0] == task.tokenizer.bos
    assert first["targets"][0, 0] == task.tokenizer.pad, "the beginning is not asked for"
    assert int(first["inputs"].max()) == task.tokenizer.size, "a symbol that no text has masks words"
    assert load_trained(run).model.config.mask == task.tokenizer.size


def test_the_loss_is_of_hidden_tokens_alone(run: Path) -> None:
    loaded = load_trained(run)
    task = build_task(loaded.recipe, run / "data")
    batch = task.samples("valid", training=False).batch(np.arange(5))
    asked = batch["targets"] != task.tokenizers()["text"].pad
    with torch.no_grad():
        found = task.loss(loaded.model, batch)
        logits = loaded.model(batch["inputs"], padding=batch.get("padding")).logits[asked]
    expected = torch.nn.functional.cross_entropy(logits, batch["targets"][asked], reduction="sum")
    assert found.count == int(asked.sum())
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "RUN", "--prompt", "w1"], "only language models generate text"),
        (["evaluate", "RUN", "--context-window", "5"], "a context window is for language models"),
    ],
)
def test_what_it_cannot_do_is_said(words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(run) if word == "RUN" else word for word in words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_mechanisms_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = write_recipe(tmp_path, **LINFORMER), tmp_path / "out"
    short = ["train.updates=2", "--lengths", "16", "--tokens", "32", "--rounds", "1", "--seeds", "1"]
    assert command(["compare", str(recipe), "--mixers", "softmax,linformer", *short, "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert [trial["status"] for trial in result["trials"]] == ["done", "done", "done"]
    assert [floor["name"] for floor in result["floors"]] == ["unigram", "neighbouring words"]
    assert {point["part"] for point in result["measurements"]["lengths"]} == {"encoder", "full"}
    assert "perplexity of masked words" in capsys.readouterr().out


def test_masking_means_nothing_to_other_tasks() -> None:
    recipe = "small/speeches"
    with pytest.raises(ValueError, match=r"data\.masking has no meaning for task language-model"):
        read_recipe(recipe, ["data.masking.share=0.3"])


# ---------------------------------------------------------------------- the official Linformer

FIXTURES = sorted((FOLDER / "linformer").glob("official_roberta_*.safetensors"))
LENGTH = 32


def write_checkpoint(
    fixture: Fixture, path: Path, task: str = "masked_lm", change: Callable[[dict[str, Any]], None] | None = None
) -> str:
    """A file as fairseq saves it, from the weights of a golden fixture, and its dictionary beside it."""
    state = fixture.under("weights.")
    vocab = len(state["encoder.sentence_encoder.embed_tokens.weight"])
    (path.parent / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(vocab - 5)))  # 4 special, <mask>
    training = {"tokens_per_sample": LENGTH, "sample_break_mode": "complete", "mask_prob": 0.2, "dropout": 0.1}
    training |= {"optimizer": "adam", "lr": [5e-4], "lr_scheduler": "polynomial_decay", "total_num_update": 1000}
    names = {"arch": "linformer_roberta_base", "task": task, **roberta_arguments(fixture.config), **training}
    history = [{"num_updates": 7}]
    contents = {"args": argparse.Namespace(**names), "model": state, "optimizer_history": history}
    if change is not None:
        change(contents)
    torch.save(contents, path)
    return str(path)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_official_linformer_computes_what_it_did(path: Path, tmp_path: Path) -> None:
    fixture = load(path)
    assert command(["import", write_checkpoint(fixture, tmp_path / "old.pt"), "--out", str(tmp_path / "run")]) == 0
    model = load_trained(tmp_path / "run").model
    assert isinstance(model, MaskedLanguageModel)
    tokens = fixture["in.tokens"]
    padding = tokens == fixture.config["pad"]
    clean = ~padding.any(1)  # the original lets padding reach the tokens
    assert clean.any()
    with torch.no_grad():
        logits = model(tokens, padding=padding).logits
    assert_close(logits[clean], fixture["out.logits"][clean], OUTPUT_TOLERANCE, "logits")


def test_the_official_linformer_is_an_ordinary_run(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert command(["import", write_checkpoint(load(FIXTURES[-1]), tmp_path / "old.pt"), "--out", run]) == 0
    recipe = read_recipe(tmp_path / "run/recipe.yaml")
    assert isinstance(recipe.data, MaskedLanguageModelData)
    assert recipe.data.masking.share == 0.2
    assert (recipe.data.blocks.tokens_per_sample, recipe.data.blocks.breaks) == (LENGTH, "complete")
    splits = [f"data.splits.{split}={path}" for split, path in write_texts(tmp_path).items()]
    assert command(["evaluate", run, "--split", "test", *splits]) == 0
    before = json.loads((tmp_path / "run/evaluation-test.json").read_text())["metrics"]["ppl"]["value"]
    assert command(["train", f"{run}/recipe.yaml", "--out", run, *splits, "train.updates=60"]) == 0
    assert command(["evaluate", run, "--split", "test"]) == 0
    after = json.loads((tmp_path / "run/evaluation-test.json").read_text())["metrics"]["ppl"]["value"]
    assert after < before
    long = tmp_path / "long.txt"
    long.write_text(" ".join(WORDS * 5) + "\n")
    assert command(["evaluate", run, "--split", "test", f"data.splits.test={long}"]) == 0, "lines are cut, not refused"
    assert command(["export", run, "--to", "onnx", "--out", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported/model.onnx").is_file()


def in_groups(contents: dict[str, Any]) -> None:
    """The layout with `cfg`."""
    options = vars(contents.pop("args"))
    names = ("tokens_per_sample", "sample_break_mode", "mask_prob")
    task = {"_name": options["task"], **{name: options[name] for name in names}}
    contents |= {"args": None, "cfg": {"model": argparse.Namespace(**options), "task": task}}


def with_an_older_norm(contents: dict[str, Any]) -> None:
    """As until 2021."""
    state = contents["model"]
    contents["model"] = {name.replace(".layernorm_embedding.", ".emb_layer_norm."): state[name] for name in state}


@pytest.mark.parametrize("change", [in_groups, with_an_older_norm])
def test_other_layouts_are_the_same_model(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    fixture = load(FIXTURES[0])
    for name, how in (("plain", None), ("other", change)):
        path = write_checkpoint(fixture, tmp_path / f"{name}.pt", change=how)
        assert command(["import", path, "--out", str(tmp_path / name)]) == 0
    plain, other = (load_trained(tmp_path / name) for name in ("plain", "other"))
    assert plain.recipe.data.model_dump()["masking"] == other.recipe.data.model_dump()["masking"]
    expected = plain.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.model.state_dict().items())


def test_what_is_shared_is_read_from_the_weights(tmp_path: Path) -> None:
    """The first release trained the head apart, and a matrix in each layer under the names of a shared one."""

    def as_first_released(contents: dict[str, Any]) -> None:
        contents["args"].shared_layer_kv_compressed, contents["args"].freeze_compress = 1, 1
        state, encoder = contents["model"], "encoder.sentence_encoder."
        state["encoder.lm_head.weight"] = state["encoder.lm_head.weight"] + 1
        for number in (0, 1):
            own = state[f"{encoder}layers.{number}.self_attn.compress_k.weight"]
            state[f"{encoder}layers.{number}.self_attn.compress_v.weight"] = own
            state[f"{encoder}layers.{number}.shared_compress_layer.weight"] = own
            state[f"{encoder}layers.{number}.shared_compress_layer.bias"] = own[:, 0]

    path = write_checkpoint(load(FIXTURES[0]), tmp_path / "old.pt", change=as_first_released)
    assert command(["import", path, "--out", str(tmp_path / "run")]) == 0
    model = load_trained(tmp_path / "run").model
    assert model.config.encoder.mixer.options["share_kv"]
    assert model.config.encoder.mixer.options["frozen"]
    weights = model.state_dict()
    first, second = (weights[f"encoder.blocks.{number}.mixer.compress_k"] for number in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(weights["head.weight"], weights["embedding.tokens.weight"])


def test_what_cannot_be_taken_over_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(contents: dict[str, Any]) -> None:
        contents["args"].mask_whole_words = True

    path = write_checkpoint(load(FIXTURES[0]), tmp_path / "old.pt", change=change)
    lines = (tmp_path / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("".join(f"{line.removeprefix('w')}\n" for line in lines))
    assert command(["import", path, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "tokens are masked one by one; the original's mask_whole_words is not supported" in said
    assert "the pieces of the dictionary are numbers, as of GPT-2's BPE: text goes in as" in said


def test_other_tasks_of_the_official_linformer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(load(FIXTURES[0]), tmp_path / "old.pt", task="sentence_prediction")
    assert command(["import", path, "--out", str(tmp_path / "run")]) == 1
    assert "fairseq's task 'sentence_prediction' is not supported; supported: translation" in capsys.readouterr().err
