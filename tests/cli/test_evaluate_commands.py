"""Trained runs under `subquad evaluate`, `average` and `classify`: files, numbers, refusals, several processes."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
import yaml
from safetensors.torch import load_file

from subquad.cli.main import run as command
from subquad.models import LanguageModel
from subquad.train.checkpoint import load_checkpoint
from subquad.train.run import evaluate_run, load_trained

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")

pytestmark = pytest.mark.usefixtures("preloaded_programs")
Image = pytest.importorskip("PIL.Image", reason="image files need the vision extra")

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16, "norm": "pre"}
COMMON: dict[str, Any] = {
    "optim": {"name": "adam"},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 2},
    "checkpoints": {"keep_last": 9, "keep_epochs": 9},
}
PAIRS = [(f"{word} {number}", f"{number} {word}") for word in ("red", "blue", "ice-cold") for number in range(8)]
LINES = ["the house is red", "", "a blue sea", "Grüße an alle", "the tree is old and tall"]


def written(folder: Path, lines: list[str], name: str) -> str:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def trained(folder: Path, recipe: dict[str, Any], name: str = "run") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(COMMON | recipe))
    assert command(["train", str(path), "--out", str(folder / name)]) == 0
    return folder / name


def translation(folder: Path, seed: int = 1) -> dict[str, Any]:
    sources, targets = (written(folder, [pair[i] for pair in PAIRS], f"text.{i}") for i in (0, 1))
    test = [*PAIRS[:5], ("", "nothing"), ("red " * 30, "long")]
    files = [written(folder, [pair[i] for pair in test], f"test.{i}") for i in (0, 1)]
    splits = {"train": [sources, targets], "valid": [sources, targets], "test": files}
    return {
        "task": "translation",
        "data": {"splits": splits, "tokenizer": {"kind": "bytes"}, "max_length": 60},
        "model": {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": STACK},
        "train": {"epochs": 3, "seed": seed, "budget": {"max_tokens": 200}},
        "decode": {"beam": 2, "max_len_b": 12},
    }


def language(folder: Path) -> dict[str, Any]:
    text = written(folder, LINES * 8, "train.txt")
    splits = {"train": text, "valid": text, "test": written(folder, LINES, "test.txt")}
    return {
        "task": "language-model",
        "data": {"splits": splits, "tokenizer": {"kind": "bytes"}, "blocks": {"tokens_per_sample": 16}},
        "model": {"preset": "lm_small", "dim": 16, "decoder": STACK},
        "train": {"updates": 8, "budget": {"max_tokens": 256}},
    }


DIGITS: dict[str, Any] = {
    "task": "image-classification",
    "data": {"embedded": "digits"},
    "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": STACK},
    "train": {"updates": 6, "budget": {"max_sentences": 100}},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    return trained(folder, translation(folder))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    return trained(folder, language(folder))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("digits"), DIGITS)


def result(run: Path, split: str = "test") -> dict[str, Any]:
    return json.loads((run / f"evaluation-{split}.json").read_text())


# ---------------------------------------------------------------------- what is measured


def test_translation_counts_every_line_as_it_was_given(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test set has an empty source and one that preparing skips as too long; both are scored."""
    assert command(["evaluate", str(pairs)]) == 0
    found, shown = result(pairs), capsys.readouterr().out
    assert (found["samples"], found["lost"], found["counts"]["empty"]) == (7, 0, 1)
    hypotheses = (pairs / "evaluation-test.hyp.txt").read_text().splitlines()
    assert len(hypotheses) == 7
    assert hypotheses[5] == ""
    references = [*(target for _, target in PAIRS[:5]), "nothing", "long"]
    expected = sacrebleu.corpus_bleu(hypotheses, [references])
    metrics = found["metrics"]
    assert metrics["bleu"]["value"] == pytest.approx(expected.score, abs=1e-9)
    assert metrics["chrf"]["value"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-9)
    for name in ("bleu", "chrf", "tokenised_bleu", "compound_bleu", "ppl"):
        assert metrics[name]["signature"] in shown
        assert metrics[name]["low"] <= metrics[name]["value"] <= metrics[name]["high"]
    assert metrics["bleu"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
    assert found["settings"]["decode"]["beam"] == 2
    assert found["checkpoint"].startswith("update-")
    assert found["data"]["text"] == "as given"


def test_decoding_can_be_changed_and_the_model_cannot(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "short.json"
    assert command(["evaluate", str(pairs), "decode.max_len_b=1", "--out", str(out), "--split", "valid"]) == 0
    assert json.loads(out.read_text())["settings"]["decode"]["max_len_b"] == 1
    assert all(len(line.encode()) <= 1 for line in (tmp_path / "short.hyp.txt").read_text().splitlines())
    with pytest.raises(ValueError, match="only options of decode and data"):
        load_trained(pairs, changes=["model.dim=32"])


def by_hand(run: Path, context: int) -> tuple[float, int]:
    """Summed -log p and the number of tokens, one token at a time, each with the context that its piece gives it."""
    loaded = load_trained(run)
    model, tokenizer = loaded.model, loaded.tokenizer("text")
    assert isinstance(model, LanguageModel)
    stream = [token for line in LINES for token in (*tokenizer.encode(line), tokenizer.eos)]
    inputs, step, total = [tokenizer.eos, *stream[:-1]], 16 - context, 0.0
    with torch.no_grad():
        for place, token in enumerate(stream):
            begin = max(0, place // step * step - context)
            logits = model(torch.tensor([inputs[begin : place + 1]])).logits[0, -1]
            total -= float(logits.log_softmax(-1)[token])
    return total, len(stream)


@pytest.mark.parametrize("context", [0, 8, 15])
def test_perplexities_and_their_denominators(text: Path, context: int) -> None:
    assert command(["evaluate", str(text), "--context-window", str(context)]) == 0
    found = result(text, f"test-context-{context}" if context else "test")
    total, tokens = by_hand(text, context)
    size = len("".join(f"{line}\n" for line in LINES).encode())
    words = sum(len(line.split()) + 1 for line in LINES)
    assert (found["counts"]["tokens"], found["counts"]["words"], found["counts"]["bytes"]) == (tokens, words, size)
    metrics = found["metrics"]
    assert metrics["ppl"]["value"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert metrics["word_ppl"]["value"] == pytest.approx(math.exp(total / words), rel=1e-4)
    assert metrics["bits_per_byte"]["value"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert f"context:{context}" in metrics["ppl"]["signature"]
    assert (found["samples"], found["lost"]) == (len(LINES), 0)


def test_several_splits_and_windows_are_kept_side_by_side(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in text.glob("evaluation-*"):
        path.unlink()
    assert command(["evaluate", str(text), "--split", "valid,test", "--context-window", "0,8"]) == 0
    shown = capsys.readouterr().out
    values = []
    for split in ("valid", "test"):
        for window, name in ((0, split), (8, f"{split}-context-8")):
            found = result(text, name)
            assert (found["split"], found["settings"]["context_window"]) == (split, window)
            values.append(found["metrics"]["ppl"]["value"])
    assert len(set(values)) == 4
    table = [line.split() for line in shown.splitlines()[-4:]]
    assert [row[:2] for row in table] == [["valid", "0"], ["valid", "8"], ["test", "0"], ["test", "8"]]
    assert [row[2] for row in table] == [f"{value:.2f}" for value in values]
    assert command(["evaluate", str(text), "--context-window", "8", "--against", str(text)]) == 0
    assert result(text, "test-context-8")["against"]["metrics"]["ppl"]["difference"] == 0


def test_the_first_samples(text: Path, pairs: Path, digits: Path) -> None:
    for run in (text, pairs, digits):
        assert command(["evaluate", str(run)]) == 0
        assert command(["evaluate", str(run), "--first", "3"]) == 0
        assert result(run, "test-first-3")["samples"] == 3
        whole, part = (load_file(run / f"evaluation-{name}.samples.safetensors") for name in ("test", "test-first-3"))
        assert whole.keys() == part.keys()
        if run != text:  # a language model's blocks go over the ends of lines
            for name, rows in part.items():
                torch.testing.assert_close(rows, whole[name][:3], rtol=1e-5, atol=1e-4)


def test_accuracy_is_that_of_the_logits(digits: Path) -> None:
    from subquad.data.builtin import load

    assert command(["evaluate", str(digits)]) == 0
    test, loaded = load("digits").test, load_trained(digits)
    described = loaded.inputs["transform"]
    assert described["kind"] == "standardise"
    mean, std = (torch.tensor(described[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        logits = loaded.model((torch.from_numpy(test.images) - mean) / std).logits
    best = logits.topk(5).indices == torch.from_numpy(test.labels)[:, None]
    metrics = result(digits)["metrics"]
    assert metrics["top1"]["value"] == pytest.approx(float(best[:, 0].float().mean()))
    assert metrics["top5"]["value"] == pytest.approx(float(best.any(1).float().mean()))
    assert result(digits)["samples"] == len(test)


# ---------------------------------------------------------------------- where things are


def moved(run: Path, folder: Path, data: dict[str, Any]) -> Path:
    """A copy of what using a run needs, with other data in its recipe."""
    folder.mkdir()
    for name in ("recipe.yaml", "inputs.json"):
        shutil.copy(run / name, folder)
    for name in ("tokenizers", "checkpoints"):
        shutil.copytree(run / name, folder / name)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"] |= data
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_a_run_is_enough_by_itself(pairs: Path, tmp_path: Path) -> None:
    """Neither prepared tokens nor the files of training are opened."""
    gone = {split: ["gone.0", "gone.1"] for split in ("train", "valid")}
    splits = yaml.safe_load((pairs / "recipe.yaml").read_text())["data"]["splits"] | gone
    copy = moved(pairs, tmp_path / "copy", {"splits": splits})
    ours, other = (evaluate_run(load_trained(run), "test").hypotheses for run in (pairs, copy))
    assert ours == other


def test_prepared_data_alone_is_decoded_and_says_so(pairs: Path, tmp_path: Path) -> None:
    copy = moved(pairs, tmp_path / "copy", {"splits": {}, "folder": str(pairs / "data")})
    found = evaluate_run(load_trained(copy), "test")
    assert found.data["text"].startswith("decoded from prepared tokens")
    assert found.samples == 5, "preparing skipped an empty line and a long one"


def test_the_moving_average_is_used_where_there_is_one(tmp_path: Path) -> None:
    recipe = DIGITS | {"optim": {"name": "adam", "ema": 0.5}, "train": {**DIGITS["train"], "updates": 2}}
    loaded = load_trained(trained(tmp_path, recipe))
    stored = load_checkpoint(loaded.checkpoint)
    assert stored.ema is not None
    name = "head.weight"
    assert torch.equal(loaded.model.state_dict()[name], stored.ema[name])
    assert not torch.equal(stored.ema[name], stored.model[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "tset"], "no split 'tset'; did you mean 'test'?"),
        (["--checkpoint", "update-9"], "has no checkpoint 'update-9'; it has best, last, update-0"),
        (["--context-window", "8"], "a context window is for language models"),
        (["--context-window", "8,many"], "--context-window: 'many' is not a whole number"),
        (["--split", "valid,test", "--out", "x.json"], "--out is one file"),
        (["--out", "result.txt"], "the name of a JSON file is needed"),
        (["decode.beem=3"], "did you mean 'beam'?"),
        (["--against", "nowhere"], "there is no run nowhere to compare with"),
    ],
)
def test_mistakes_are_one_line(pairs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["evaluate", str(pairs), *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_is_no_run_is_refused(pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run"):
        load_trained(tmp_path)
    shutil.copy(pairs / "recipe.yaml", tmp_path)
    with pytest.raises(ValueError, match=r"holds no inputs\.json"):
        load_trained(tmp_path)
    shutil.copy(pairs / "inputs.json", tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        load_trained(tmp_path)


def test_lost_samples_make_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images that cannot be read have no result: the others are measured, and the command fails."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name, level in (("dark", 40), ("light", 200)):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = generator.integers(level, level + 40, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    augment = {"size": 8, "crop": "none", "randaugment": None, "jitter": 0.0, "erase": 0.0}
    images = {split: str(tmp_path / split) for split in ("train", "test")}
    recipe = DIGITS | {"data": {"images": images | {"valid": images["train"]}, "augment": augment}}
    run = trained(tmp_path, recipe)
    broken = tmp_path / "test" / "dark" / "2.png"
    broken.write_bytes(broken.read_bytes()[:60])
    shutil.rmtree(tmp_path / "train")  # evaluating needs the test images alone
    with pytest.warns(UserWarning, match=r"left out: .*2\.png"):
        assert command(["evaluate", str(run)]) == 1
    assert "1 of 8 samples of test were lost" in capsys.readouterr().err
    found = result(run)
    assert (found["samples"], found["lost"]) == (8, 1)
    with pytest.warns(UserWarning, match=r"left out: .*2\.png"):  # the same from a process that reads images
        assert command(["evaluate", str(run), "train.data_workers=1"]) == 1
    capsys.readouterr()
    assert result(run)["metrics"] == found["metrics"]

    good = tmp_path / "test" / "light" / "0.png"
    assert command(["classify", str(run), str(broken), str(good), str(tmp_path / "none.png")]) == 1
    told = capsys.readouterr()
    (line,) = told.out.splitlines()
    name, _, classes = line.partition(": ")
    shares = [part.split() for part in classes.split(", ")]
    assert name == str(good)
    assert {label for label, *_ in shares} == {"dark", "light"}
    assert sum(float(share) for _, share, _ in shares) == pytest.approx(100, abs=0.2)
    assert [str(broken) in told.err, "none.png: there is no such file" in told.err] == [True, True]
    assert told.err.count("\n") == 3, "one line for each file, and one at the end"
    assert "2 of 3 files" in told.err


# ---------------------------------------------------------------------- two systems


def test_paired_runs(pairs: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["evaluate", str(pairs)]) == 0
    assert command(["evaluate", str(pairs), "--against", str(pairs)]) == 0
    same = result(pairs)["against"]["metrics"]
    assert list(same) == ["bleu", "chrf", "tokenised_bleu", "compound_bleu", "ppl"]
    assert {(one["difference"], one["p_value"]) for one in same.values()} == {(0, 1)}
    other = trained(tmp_path, translation(tmp_path, seed=2))
    capsys.readouterr()
    assert command(["evaluate", str(other), "--against", str(pairs), "--resamples", "200"]) == 0
    shown = capsys.readouterr().out
    found = result(other)
    difference = found["against"]["metrics"]["ppl"]
    assert difference["difference"] == pytest.approx(
        found["metrics"]["ppl"]["value"] - result(pairs)["metrics"]["ppl"]["value"]
    )
    assert difference["resamples"] == 200
    assert f"{difference['p_value']:.3f}" in shown
    bare = tmp_path / "evaluation-test.json"  # a stored ppl of another tokenizer is left out, and said so
    shutil.copy(other / "evaluation-test.samples.safetensors", tmp_path)
    found["metrics"]["ppl"]["signature"] = "another"
    bare.write_text(json.dumps(found))
    assert command(["evaluate", str(pairs), "--against", str(bare)]) == 0
    assert "ppl" not in result(pairs)["against"]["metrics"]
    assert result(pairs)["against"]["not_compared"]["ppl"].endswith("another there")
    assert command(["evaluate", str(text)]) == 0
    assert command(["evaluate", str(text), "--context-window", "3", "--against", str(text)]) == 1
    assert f"`subquad evaluate {text} --split test --context-window 3` first" in capsys.readouterr().err
    stored = str(text / "evaluation-test.json")
    assert command(["evaluate", str(text), "--context-window", "3", "--against", stored]) == 1
    assert "has no metric that was computed as here" in capsys.readouterr().err
    assert command(["evaluate", str(pairs), "--against", str(text)]) == 1
    (line,) = capsys.readouterr().err.splitlines()  # before anything is translated
    assert "run is a run of task translation, " in line
    assert "of language-model: the two cannot be compared" in line
    found["data"]["sha256"] = "another"
    bare.write_text(json.dumps(found))
    assert command(["evaluate", str(pairs), "--against", str(bare)]) == 1
    assert "evaluates other samples" in capsys.readouterr().err


# ---------------------------------------------------------------------- several processes


SHARED = """import sys
from pathlib import Path
import subquad
from subquad.cli.main import run
out, pairs, text, digits = map(Path, sys.argv[1:])
for name, folder in (("text", text), ("digits", digits)):
    subquad.evaluate(folder, out=out / f"{name}-two.json")
sys.exit(run(["evaluate", str(pairs), "--out", str(out / "pairs-two.json")]))
"""


def test_two_processes_measure_what_one_does(pairs: Path, text: Path, digits: Path, tmp_path: Path) -> None:
    runs = {"pairs": pairs, "text": text, "digits": digits}
    for kind, run in runs.items():
        assert command(["evaluate", str(run), "--out", str(tmp_path / f"{kind}-one.json")]) == 0
    script = tmp_path / "commands.py"
    script.write_text(SHARED)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    line += [str(tmp_path), *map(str, runs.values())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1, "one process speaks"
    for kind in runs:
        one, two = (json.loads((tmp_path / f"{kind}-{name}.json").read_text()) for name in ("one", "two"))
        assert [one[key] for key in ("samples", "lost", "counts", "data")] == [
            two[key] for key in ("samples", "lost", "counts", "data")
        ]
        for name, metric in one["metrics"].items():
            assert two["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-5), name
        first, second = (load_file(tmp_path / f"{kind}-{name}.samples.safetensors") for name in ("one", "two"))
        for name, values in first.items():
            torch.testing.assert_close(second[name], values, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------------- averages and classes


def test_average_of_epochs_updates_and_names(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = sorted((pairs / "checkpoints").glob("update-*"))
    assert len(stored) == 3, "one for each epoch"

    def mean(paths: list[Path]) -> torch.Tensor:
        return torch.stack([load_checkpoint(path).model["target.tokens.weight"] for path in paths]).mean(0)

    for words, paths in (
        (["--epochs", "2"], stored[1:]),
        (["--updates", "3"], stored),
        (["--epochs", "2", "--up-to", "2"], stored[:2]),
        ([stored[0].name, str(stored[2])], [stored[0], stored[2]]),
    ):
        assert command(["average", str(pairs), *words, "--name", "mine"]) == 0
        loaded = load_trained(pairs, "mine")
        torch.testing.assert_close(loaded.model.state_dict()["target.tokens.weight"], mean(paths))
        assert all(path.name in capsys.readouterr().out for path in paths[:1])
    assert load_trained(pairs, "last").checkpoint == stored[2], "an average is no checkpoint of training"
    assert command(["evaluate", str(pairs), "--checkpoint", "mine"]) == 0
    assert result(pairs)["checkpoint"] == "mine"
    shutil.rmtree(pairs / "checkpoints" / "mine")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say which checkpoints to average"),
        (["--epochs", "1", "--updates", "1"], "say which checkpoints to average"),
        (["--epochs", "9"], "holds 3 checkpoints at the end of an epoch, fewer than the 9 asked for"),
        (["update-000000001", "--up-to", "3"], "a last epoch or update goes with"),
        (["nothing"], "has no checkpoint 'nothing'"),
        (["--epochs", "1", "--name", "update-7"], "would be taken for a checkpoint of training"),
        (["--epochs", "1", "--name", "a/b"], "where the name of the result is needed"),
    ],
)
def test_averages_that_cannot_be(
    pairs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["average", str(pairs), *words]) == 1
    assert message in capsys.readouterr().err


def test_classify_arrays(digits: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from subquad.data.builtin import load

    images = load("digits").test.images[:3]
    np.save(tmp_path / "one.npy", images[0, 0])
    np.save(tmp_path / "some.npy", images)
    np.savez(tmp_path / "some.npz", images=images.transpose(0, 2, 3, 1))
    np.save(tmp_path / "large.npy", np.zeros((9, 9), np.float32))
    np.savez(tmp_path / "other.npz", sounds=images)
    names = [str(tmp_path / name) for name in ("one.npy", "some.npy", "some.npz", "large.npy", "other.npz")]
    assert command(["classify", str(digits), *names]) == 1
    told = capsys.readouterr()
    lines = [line.partition(": ") for line in told.out.splitlines()]
    assert [name for name, *_ in lines] == [names[0], *(f"{name}[{i}]" for name in names[1:3] for i in range(3))]
    said = [classes for *_, classes in lines]
    assert said[0] == said[1] == said[4]
    assert said[1:4] == said[4:7]
    loaded = load_trained(digits)
    mean, std = (torch.tensor(loaded.inputs["transform"][name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        best = loaded.model((torch.from_numpy(images) - mean) / std).logits.softmax(-1).max(-1)
    for text, share, number in zip(said[1:4], best.values.tolist(), best.indices.tolist(), strict=True):
        assert text.startswith(f"{number} {100 * share:.1f} %, ")
        assert text.count("%") == 5
    assert "large.npy is (1, 9, 9) (channels, height, width); this model reads (1, 8, 8)" in told.err
    assert "other.npz cannot be read: it has no array called images" in told.err
    assert command(["classify", str(pairs), names[0]]) == 1
    assert "was trained for translation" in capsys.readouterr().err
