"""`subquad translate` and `subquad generate` on trained runs, as users call them."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from subquad.cli.main import run as command

pytest.importorskip("babel", reason="the embedded phrases need the demo extra")

pytestmark = pytest.mark.usefixtures("preloaded_programs")

SMALL = {"layers": 1, "heads": 2, "ffn_dim": 32}
TRANSLATION = {
    "task": "translation",
    "data": {
        "embedded": "phrases",
        "options": {"train": 200, "valid": 20, "test": 20},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
    },
    "model": {
        "kind": "encoder-decoder",
        "source_vocab": 300,
        "target_vocab": 300,
        "dim": 16,
        "encoder": SMALL,
        "decoder": SMALL | {"mixer": {"name": "lightconv", "kernel_size": 3}},
    },
    "schedule": {"lr": 1e-2, "warmup_updates": 4},
    "train": {"updates": 6},
    "decode": {"max_len_b": 12, "beam": 3},
}


def train(folder: Path, recipe: dict[str, Any], name: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert command(["train", str(path), "--out", str(folder / name)]) == 0
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    language: dict[str, Any] = {
        "task": "language-model",
        "data": {"splits": {}, "tokenizer": {"kind": "characters"}, "blocks": {"tokens_per_sample": 16}},
        "model": {"kind": "language-model", "vocab": 40, "dim": 16, "decoder": SMALL | {"mixer": "lightconv"}},
        "schedule": {"lr": 1e-2, "warmup_updates": 4},
        "train": {"updates": 4},
    }
    for split in ("train", "valid"):
        path = folder / f"{split}.txt"
        path.write_text("the cat sat on the mat\nthe dog ran to the cat\n" * 20)
        language["data"]["splits"][split] = str(path)
    return {"translation": train(folder, TRANSLATION, "translation"), "language": train(folder, language, "language")}


class Called(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def called(monkeypatch, capsys) -> Callable[..., Called]:
    def call(*words: str | Path, text: str | bytes = "") -> Called:
        given = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        return Called(command([str(word) for word in words]), *capsys.readouterr())

    return call


def test_every_line_is_translated(runs, called, tmp_path) -> None:
    lines = ["5 km", "", "3 May 2020", "  ", "\N{GREEK SMALL LETTER ALPHA}\N{SNOWMAN}", "7:30"]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines))  # the last line has no end
    with path.open("rb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "subquad.cli.main", "translate", str(runs["translation"])],
            stdin=stream,
            capture_output=True,
            check=True,
        )
    assert len(done.stdout.decode().split("\n")) == len(lines) + 1
    assert "2 lines were empty" in done.stderr.decode()
    piped = called("translate", runs["translation"], text="\n".join(lines))
    assert piped.out == done.stdout.decode()


def test_a_line_is_answered_before_the_next_one_comes(runs) -> None:
    words = [sys.executable, "-m", "subquad.cli.main", "translate", str(runs["translation"])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"5 km\n", b"7:30\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")  # waits until it is there
        process.stdin.close()
        assert process.wait() == 0


def test_columns(runs, called) -> None:
    options = ["--nbest", "2", "--scores", "--alignments"]
    done = called("translate", runs["translation"], *options, text="5 km\n7:30\n")
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    assert float(rows[0][1]) >= float(rows[1][1])
    for row in rows:
        assert all(pair.partition("-")[0].isdigit() for pair in row[3].split())


def test_an_ensemble_of_one_model_twice_is_that_model(runs, called) -> None:
    run = runs["translation"]
    assert called("translate", run, run, text="5 km\n").out == called("translate", run, text="5 km\n").out


def test_translations_begin_with_the_prefix(runs, called) -> None:
    done = called("translate", runs["translation"], "--prefix", text="5 km\tMontag\n")
    assert done.out.startswith("Montag")
    done = called("translate", runs["translation"], "--prefix", text="5 km\n")
    assert (done.code, "line 1 has no tab" in done.err) == (1, True)


def test_bytes_that_are_no_text_are_counted(runs, called) -> None:
    done = called("translate", runs["translation"], text=b"5 km\n\xff\xfe\nab\0c\n")
    assert done.out.count("\n") == 3
    assert "1 lines were not UTF-8" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["translate", "nowhere"], "nowhere is no run"),
        (["translate", "{language}"], "only runs of translation translate"),
        (["generate", "{translation}"], "only language models generate text"),
        (["translate", "{translation}", "--beam", "0"], "beam"),
        (["translate", "{translation}", "--beam", "2", "--nbest", "3"], "has only 2 hypotheses"),
        (["generate", "{language}", "--greedy", "--beam", "2"], "not both"),
        (["translate", "{translation}", "--checkpoint", "update-7"], "has no checkpoint 'update-7'"),
    ],
)
def test_refusals(runs, capsys, words, message) -> None:
    assert command([word.format(**runs) for word in words]) == 1
    assert message in capsys.readouterr().err


def test_texts_go_on(runs, capsys) -> None:
    run = str(runs["language"])
    assert command(["generate", run, "--prompt", "the cat", "--tokens", "5", "--samples", "2"]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert len(drawn) == 2
    assert all(line.startswith("the cat") for line in drawn)
    assert command(["generate", run, "--prompt", "the cat", "--tokens", "5", "--samples", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == drawn
    assert (
        command(["generate", run, "--prompt", "the", "--beam", "3", "--samples", "3", "--json", "--tokens", "5"]) == 0
    )
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == ["the"] * 3
    assert found[0]["score"] == max(one["score"] for one in found)
    assert command(["generate", run, "--greedy", "--tokens", "3"]) == 0
