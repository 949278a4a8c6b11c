"""Imported runs and their data: binarised folders are found, other data takes their place, and runs can be moved."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import subquad
from subquad.cli.main import run as command
from subquad.data.tokenizers.fairseq import FairseqDictionary, MosesTokenizer, post_process
from subquad.evaluate.bleu_and_chrf import bleu
from subquad.interop.checkpoints.safe_pickle import read_pickle
from subquad.train.run import load_trained
from tests.data.fairseq_files import numbered, write_mmap
from tests.interop.test_import import BEFORE_BPE, CHECKPOINTS, LEGACY

MORE = ["train.updates=241", "schedule.lr=0.001"]


def binarised(folder: Path) -> Path:
    """The golden text as fairseq-preprocess leaves it, with the golden dictionaries."""
    folder.mkdir(parents=True)
    for side in ("src", "tgt"):
        (folder / f"dict.{side}.txt").write_bytes((CHECKPOINTS / f"dict.{side}.txt").read_bytes())
        ids = FairseqDictionary.load(folder / f"dict.{side}.txt").ids
        lines = numbered((CHECKPOINTS / f"test.{side}").read_text().splitlines(), ids)
        for split in ("train", "valid", "test"):
            write_mmap(folder / f"{split}.src-tgt.{side}", lines)
    return folder


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a checkpoint that names its data folder, in which alone its dictionaries are. It has codes."""
    binarised(tmp_path / "data-bin")
    monkeypatch.chdir(tmp_path)
    contents = read_pickle(LEGACY)
    contents["args"].data = "data-bin"
    torch.save(contents, "checkpoint.pt")
    Path("code").write_text(BEFORE_BPE)
    assert command(["import", "checkpoint.pt", "--out", "run", "--codes", "code", "--no-moses"]) == 0
    return tmp_path / "run"


def data_of(run: Path) -> dict[str, object]:
    section = yaml.safe_load((run / "recipe.yaml").read_text())["data"]
    return {name: value for name, value in section.items() if value and name in ("fairseq", "splits", "tokenizer")}


def test_the_folder_of_the_dictionaries_is_the_data(imported: Path, tmp_path: Path) -> None:
    found = data_of(imported)
    assert found["fairseq"] == {"path": str(tmp_path / "data-bin"), "languages": ["src", "tgt"], "codes": None}
    assert command(["evaluate", str(imported), "--resamples", "10"]) == 0
    report = json.loads((imported / "evaluation-test.json").read_text())
    assert report["samples"] == len((CHECKPOINTS / "test.src").read_text().splitlines())
    assert command(["train", str(imported / "recipe.yaml"), *MORE]) == 0
    own = load_trained(imported, "last").tokenizer("source")
    assert isinstance(own, MosesTokenizer), "the folder has ids only; the run still knows its codes"


def test_a_moved_run_is_trained_on_other_data(imported: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(imported, moved)
    files = f"[{CHECKPOINTS / 'test.src'}, {CHECKPOINTS / 'test.tgt'}]"
    splits = [f"data.splits.{split}={files}" for split in ("train", "valid")]
    assert command(["train", str(moved / "recipe.yaml"), *splits, *MORE]) == 0
    assert "fairseq" not in data_of(moved)
    assert str(imported) not in (moved / "recipe.yaml").read_text()


def test_a_run_without_data_takes_a_folder_of_fairseqs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert command(["import", str(LEGACY), "--out", str(run)]) == 0
    assert "splits" in data_of(run), "names that stand for files"
    folder = binarised(tmp_path / "data-bin")
    # the same number of symbols in another order would be another meaning of every number
    dictionary = folder / "dict.tgt.txt"
    right = dictionary.read_text()
    dictionary.write_text("".join(reversed(right.splitlines(keepends=True))))
    words = ["train", str(run / "recipe.yaml"), f"data.fairseq={folder}", *MORE]
    assert command(words) == 1
    assert f"the dictionary in {folder} has " in capsys.readouterr().err
    dictionary.write_text(right)
    assert command(words) == 0
    assert "splits" not in data_of(run)
    assert command(["evaluate", str(run), f"data.fairseq={folder}", "--resamples", "10"]) == 0


def test_pieces_become_words_without_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In translations, and in evaluation in references as well: BLEU is of words, perplexity of pieces."""
    golden = json.loads((CHECKPOINTS / "generation.json").read_text())["dynamic"]["hypos"]
    lines = (CHECKPOINTS / "test.src").read_text().splitlines()
    for name, words in {"pieces": [], "words": ["--remove-bpe", "subword_nmt"]}.items():
        assert command(["import", str(LEGACY), "--out", str(tmp_path / name), *words]) == 0
    assert "in pieces of the dictionaries, and comes out in words" in capsys.readouterr().out
    joined = subquad.load_run(tmp_path / "words").translate(lines, beam=4)
    assert joined == [hypotheses[0]["text"] for hypotheses in golden]
    apart = subquad.load_run(tmp_path / "pieces")
    assert any("@@" in text for text in apart.translate(lines, beam=4))
    assert apart.translate(lines, beam=4, remove_bpe="@@ ") == joined

    files = f"[{CHECKPOINTS / 'test.src'}, {CHECKPOINTS / 'test.tgt'}]"
    evaluate = ["evaluate", str(tmp_path / "pieces"), f"data.splits.test={files}", "--resamples", "10"]
    found = {}
    for option in ([], ["--remove-bpe"]):
        assert command([*evaluate, *option]) == 0
        found[bool(option)] = json.loads((tmp_path / "pieces/evaluation-test.json").read_text())["metrics"]
    references = (CHECKPOINTS / "test.tgt").read_text().splitlines()
    assert any("@@" in line for line in references)
    expected = bleu(apart.translate(lines, remove_bpe="subword_nmt"), [post_process(one, "@@ ") for one in references])
    assert found[True]["bleu"]["value"] == pytest.approx(expected.value)
    assert found[True]["ppl"]["value"] == found[False]["ppl"]["value"]
    assert command([*evaluate, "--remove-bpe", "sentence-piece"]) == 1
    assert "did you mean 'sentencepiece'?" in capsys.readouterr().err
