"""Folders of fairseq-preprocess: what is read of them in both forms, how models train on them, and what is refused."""

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.cli.main import run as command
from subquad.data.fairseq.folder import FairseqFolder
from subquad.data.fairseq.index import open_indexed
from subquad.data.text import arrays as token_arrays
from subquad.data.text.prepare import TextDataConfig, prepare_text
from subquad.data.text.store import PreparedText
from subquad.train.run import load_trained
from tests.data.fairseq_files import EOS, FORMS, LETTERS, numbered, write_dictionary, write_mmap, write_torchnet

GERMAN = ["ein hund bellt", "zwei katzen schlafen lange", "der hund schläft", "ein vogel"] * 5
ENGLISH = ["a dog barks", "two cats sleep long", "the dog sleeps", "a bird sings"] * 5
SPLITS = {"train": slice(0, 16), "valid": slice(16, 20), "test": slice(12, 16)}


def words_of(lines: list[str]) -> list[str]:
    return sorted({word for line in lines for word in line.split()} - {"bird"})  # one word is unknown


def write_pairs(folder: Path, form: str) -> Path:
    folder.mkdir()
    for language, lines in (("de", GERMAN), ("en", ENGLISH)):
        numbers = write_dictionary(folder / f"dict.{language}.txt", words_of(lines))
        for split, part in SPLITS.items():
            FORMS[form](folder / f"{split}.de-en.{language}", numbered(lines[part], numbers))
    return folder


def write_lines(folder: Path, form: str) -> Path:
    folder.mkdir()
    numbers = write_dictionary(folder / "dict.txt", words_of(ENGLISH))
    for split, part in SPLITS.items():
        FORMS[form](folder / split, numbered([*ENGLISH[part], ""], numbers))
    return folder


def prepare(folder: Path, out: Path, sample_kind: str = "pairs", **options: Any) -> PreparedText:
    config = FairseqFolder.parse("fairseq", {"path": str(folder), **options}).text_config(sample_kind)
    return prepare_text(config, out)


def rows(prepared: PreparedText, split: str, side: str) -> list[list[int]]:
    store = prepared.store(split, side)
    return [store[i].tolist() for i in range(len(store))]


# ---------------------------------------------------------------------- what is read


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(3, 99), max_size=5), min_size=1, max_size=10),
    form=st.sampled_from(sorted(FORMS)),
    code=st.sampled_from(sorted(LETTERS)),
    chunk=st.integers(1, 20),
)
def test_both_forms_give_back_their_samples(tmp_path_factory, samples, form, code, chunk) -> None:
    """Whatever the type of the numbers and the chunks they are read in; the end of a sample is no part of it."""
    folder = tmp_path_factory.mktemp("data")
    write_dictionary(folder / "dict.txt", [f"w{i}" for i in range(96)])
    FORMS[form](folder / "train", [[*sample, EOS] for sample in samples], code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_arrays, "CHUNK_TOKENS", chunk)
        assert rows(prepare(folder, folder / "out", "text"), "train", "text") == samples


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_the_text_it_was_made_of(form: str, tmp_path: Path) -> None:
    """Tokens and counts are those of the same lines as text files, read with the same dictionaries."""
    folder = write_pairs(tmp_path / "data", form)
    ours = prepare(folder, tmp_path / "ours")
    given: dict[str, Any] = {"splits": {}, "sample_kind": "pairs"}
    for split, part in SPLITS.items():
        given["splits"][split] = []
        for language, lines in (("de", GERMAN), ("en", ENGLISH)):
            path = tmp_path / f"{split}.{language}"
            path.write_text("".join(f"{line}\n" for line in lines[part]))
            given["splits"][split].append(str(path))
    for name, language in (("tokenizer", "de"), ("target_tokenizer", "en")):
        given[name] = {"kind": "words", "dictionary": str(folder / f"dict.{language}.txt")}
    theirs = prepare_text(TextDataConfig.parse("data", given), tmp_path / "theirs")
    assert ours.splits == ("test", "train", "valid")
    for split in SPLITS:
        for side in ("source", "target"):
            assert rows(ours, split, side) == rows(theirs, split, side)
        counts = [each.description["splits"][split] for each in (ours, theirs)]
        assert counts[0]["unknown"] == counts[1]["unknown"]
    assert ours.description["splits"]["train"]["unknown"] == {"source": 0, "target": 4}
    assert ours.tokenizer("target").decode(ours.store("train", "target")[3]) == "a <unk> sings"
    assert ours.tokenizer("source").fingerprint() == theirs.tokenizer("source").fingerprint()


def test_a_folder_serves_both_directions(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "data", "mmap")
    forth = prepare(folder, tmp_path / "forth", languages=("de", "en"))
    back = prepare(folder, tmp_path / "back", languages=("en", "de"))
    assert rows(forth, "valid", "source") == rows(back, "valid", "target")
    assert back.tokenizer("source").encode("dog") == forth.tokenizer("target").encode("dog")
    write_mmap(folder / "train.fr-en.fr", [[4, EOS]])
    with pytest.raises(ValueError, match=r"several pairs of languages \(de-en, fr-en\); name source and target"):
        prepare(folder, tmp_path / "which")


def test_codes_make_words_of_pieces(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text("#version: 0.2\nd o\n")
    numbers = write_dictionary(tmp_path / "dict.txt", ["do@@", "g"])
    write_mmap(tmp_path / "train", [[numbers["do@@"], numbers["g"], EOS]])
    pieces = prepare(tmp_path, tmp_path / "pieces", "text")
    words = prepare(tmp_path, tmp_path / "words", "text", codes=str(tmp_path / "codes"))
    assert rows(pieces, "train", "text") == rows(words, "train", "text") == [[4, 5]]
    assert pieces.tokenizer("text").decode([4, 5]) == "do@@ g"
    assert words.tokenizer("text").decode([4, 5]) == "dog"
    assert words.tokenizer("text").encode("dog") == [4, 5]


def test_numbers_that_change_are_read_again(tmp_path: Path) -> None:
    """The index alone does not tell: it says only how long samples are."""
    folder = write_lines(tmp_path / "data", "mmap")
    before = rows(prepare(folder, tmp_path / "out", "text"), "valid", "text")
    assert prepare(folder, tmp_path / "out", "text").changes["valid"] == "reused"
    content = np.fromfile(folder / "valid.bin", "<u2")
    content[0] = 4 if content[0] != 4 else 5
    content.tofile(folder / "valid.bin")
    again = prepare(folder, tmp_path / "out", "text")
    assert (again.changes["valid"], again.changes["train"]) == ("input changed", "reused")
    assert rows(again, "valid", "text") != before


# ---------------------------------------------------------------------- training and statistics

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "language-model": {"preset": "lm_small", "dim": 16, "decoder": STACK},
    "translation": {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": STACK},
}


def write_recipe(folder: Path, task: str, data: dict[str, Any]) -> str:
    recipe: dict[str, Any] = {
        "task": task,
        "data": data,
        "model": MODELS[task],
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 2, "budget": {"max_tokens": 128}},
    }
    if task == "language-model":
        recipe["data"]["blocks"] = {"tokens_per_sample": 16}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


@pytest.mark.parametrize(("task", "form"), [("translation", "torchnet"), ("language-model", "mmap")])
def test_training_on_a_folder(task: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = write_pairs if task == "translation" else write_lines
    folder = write(tmp_path / "data-bin", form)
    path, run = write_recipe(tmp_path, task, {"fairseq": str(folder)}), tmp_path / "run"
    assert command(["train", path, "--dry-run"]) == 0
    tried = capsys.readouterr().out
    assert re.search(r"data: folder +found", tried)
    counted = re.search(r"parameters +([\d,]+) with a vocabulary of [\d,]+(?: and [\d,]+)? *\n", tried)
    assert counted, "the dictionaries are there, and nothing is left to the data"
    assert command(["train", path, "--out", str(run)]) == 0
    trained = capsys.readouterr()
    assert "after 2 updates" in trained.out
    assert f"{counted[1]} parameters" in trained.err
    target = load_trained(run, "last").tokenizer("target" if task == "translation" else "text")
    assert target.id_to_token(4) == "a"
    assert command(["evaluate", str(run), "--split", "test", "decode.max_len_b=5"]) == 0
    found = json.loads((run / "evaluation-test.json").read_text())
    assert found["samples"] == (4 if task == "translation" else 5)

    other = write(tmp_path / "other", form)
    for file in other.glob("train.*"):
        shutil.copy(file, other / file.name.replace("train", "test"))
    assert command(["evaluate", str(run), "--split", "test", "decode.max_len_b=5", f"data.fairseq={other}"]) == 0
    swapped = json.loads((run / "evaluation-test.json").read_text())
    assert command(["evaluate", str(run), "--split", "train", "decode.max_len_b=5"]) == 0
    expected = json.loads((run / "evaluation-train.json").read_text())
    assert swapped["data"]["sha256"] == expected["data"]["sha256"] != found["data"]["sha256"], "the given data is read"


def test_a_dry_run_reads_the_dictionaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_lines(tmp_path / "data-bin", "mmap")
    with (folder / "dict.txt").open("a") as file:
        file.write("a 1\n")
    assert command(["train", write_recipe(tmp_path, "language-model", {"fairseq": str(folder)}), "--dry-run"]) == 1
    assert "'a' occurs twice" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
def test_statistics_of_a_folder(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_pairs(tmp_path / "data", form)
    assert command(["data", "stats", str(folder), "--json", "--languages", "de,en"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["sample_kind"]) == (str(folder), "pairs")
    assert found["vocabularies"]["source"]["size"] == 4 + len(words_of(GERMAN))
    target = found["splits"]["train"]["fields"]["target"]
    assert target["tokens"] == sum(len(line.split()) for line in ENGLISH[:16])
    assert target["unknown"] == 4
    assert {item["token"]: item["count"] for item in target["most_frequent"]}["dog"] == 8
    lines = write_lines(tmp_path / "lines", form)
    assert command(["data", "stats", str(lines)]) == 0
    assert "valid: 5 samples read, skipped: none" in capsys.readouterr().out


# ---------------------------------------------------------------------- refusals


def refused(folder: Path, message: str, sample_kind: str = "text", **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        prepare(folder, folder / "out", sample_kind, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_outside_of_the_dictionary(form: str, tmp_path: Path) -> None:
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    FORMS[form](tmp_path / "train", [[4, EOS], [5, 6, EOS]])
    refused(tmp_path, r"train\.idx, sample 2, number 2: 6 is outside the vocabulary of 6 tokens")


def test_the_older_form_has_no_number_zero(tmp_path: Path) -> None:
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    write_torchnet(tmp_path / "train", [[4, EOS], [-1, EOS]])
    refused(tmp_path, "sample 2, number 1: -1 is outside")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", ["idx", "bin"])
@pytest.mark.parametrize("cut", [1, 8, -1, -8])
def test_files_that_are_too_short_or_too_long(form: str, part: str, cut: int, tmp_path: Path) -> None:
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    FORMS[form](tmp_path / "train", [[4, EOS], [5, 4, EOS]], 5)
    path = tmp_path / f"train.{part}"
    content = path.read_bytes()
    path.write_bytes(content[:-cut] if cut > 0 else content + b"\0" * -cut)
    refused(tmp_path, rf"train\.{part} is damaged: ")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [0, 5, 9, 12, 20])
def test_an_index_that_ends_in_its_header(form: str, length: int, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "train", [[4, EOS]])
    content = (tmp_path / "train.idx").read_bytes()
    (tmp_path / "train.idx").write_bytes(content[:length])
    with pytest.raises(ValueError, match=r"train\.idx (is damaged: it ends inside its header|is no index)"):
        open_indexed(tmp_path / "train.idx")


MMAP, TORCHNET = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (MMAP + struct.pack("<QBQ", 1, 8, 2**64 - 1), "it says 18,446,744,073,709,551,615 samples"),
        (MMAP + struct.pack("<QBQ", 1, 8, 2**40) + b"\0" * 24, "which take 13,194,139,533,312 bytes, and has 24"),
        (MMAP + struct.pack("<QBQ", 2, 8, 0), "has version 2, but only 1 is known"),
        (MMAP + struct.pack("<QBQ", 1, 7, 0), "this file has type 7"),
        (MMAP + struct.pack("<QBQiq", 1, 8, 1, -2, 0), "sample 1 has -2 tokens"),
        (MMAP + struct.pack("<QBQ2i2q", 1, 8, 2, 1, 1, 0, 4), "are not stored one after the other"),
        (MMAP + struct.pack("<QBQiq", 1, 8, 1, 3, 0), r"train\.bin is damaged: 4 bytes, where train\.idx says 6"),
        (TORCHNET + struct.pack("<5Q", 1, 4, 4, 2**62, 2**62), "it says 4,611,686,018,427,387,904 samples"),
        (TORCHNET + struct.pack("<5Q", 1, 4, 8, 0, 0), "have 4 bytes, not 8"),
        (TORCHNET + struct.pack("<5Q2q2q2q", 1, 4, 4, 1, 2, 0, 2, 0, 1, 1, 1), "samples of text have one dimension"),
        (TORCHNET + struct.pack("<5Q2q2qq", 1, 4, 4, 1, 1, 0, 1, 0, 2, 1), "are not stored one after the other"),
        (b"IMAGEIDX and so on", "is no index of fairseq: it begins with b'IMAGEIDX '"),
    ],
)
def test_wrong_indexes(index: bytes, message: str, tmp_path: Path) -> None:
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    (tmp_path / "train.idx").write_bytes(index)
    (tmp_path / "train.bin").write_bytes(b"\4\0\2\0")
    refused(tmp_path, message)


def test_lengths_whose_sum_overflows(tmp_path: Path) -> None:
    """The index agrees with itself and with the size of the file, modulo 2^64."""
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    lengths = [2**62] * 4 + [2]
    begins = np.cumsum([0, *lengths]).tolist()
    header = TORCHNET + struct.pack("<5Q", 1, 4, 4, 5, 5)
    (tmp_path / "train.idx").write_bytes(header + struct.pack("<17q", *range(6), *begins, *lengths))
    (tmp_path / "train.bin").write_bytes(struct.pack("<2i", 5, 3))
    refused(tmp_path, r"train\.idx is damaged: sample 1 has 4,611,686,018,427,387,904 tokens")


@pytest.mark.parametrize("name", ["train.idx", "train.bin", "dict.txt"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_no_files(kind: str, name: str, tmp_path: Path) -> None:
    """Reading one of them may never end."""
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    write_mmap(tmp_path / "train", [[4, EOS]])
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).symlink_to("/dev/zero")
    refused(tmp_path, rf"{name}(:| is a pipe or a device, but a file is needed)")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a " + "9" * 5000, "line 1: 'symbol count' is needed, got 'a 999"),
        ("x" * 1_000_000, "line 1: 'symbol count' is needed, got 'xxx"),
        ("x" * 1_000_000 + " 1\n" + "x" * 1_000_000 + " 1", "line 2: 'xxx.*' occurs twice"),
    ],
)
def test_dictionaries_with_lines_without_end(line: str, message: str, tmp_path: Path) -> None:
    write_mmap(tmp_path / "train", [[4, EOS]])
    (tmp_path / "dict.txt").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=message) as caught:
        prepare(tmp_path, tmp_path / "out", "text")
    assert len(str(caught.value)) < 1000


def test_empty_data(tmp_path: Path) -> None:
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    write_mmap(tmp_path / "train", [])
    refused(tmp_path, r"train\.idx: empty, there are no samples")


def test_folders_that_lack_something(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "data", "mmap")
    refused(tmp_path / "none", "there is no such folder")
    refused(folder, "holds no data of a language model, such as train.idx")
    refused(folder, "languages are for translation", languages=("de", "en"))
    refused(folder, "has no data of de and fr; its pairs are de-en", "pairs", languages=("de", "fr"))
    refused(folder, "not samples of the kind labelled", "labelled")
    refused(write_lines(tmp_path / "lines", "mmap"), "holds no data of two languages", "pairs")
    (folder / "valid.de-en.en.bin").unlink()
    refused(folder, r"valid\.de-en\.en\.bin: there is no such file", "pairs")
    (folder / "dict.en.txt").unlink()
    refused(folder, r"dict\.en\.txt: there is no such file; fairseq-preprocess writes it", "pairs")
    write_mmap(folder / "train1.de-en.de", [[4, EOS]])
    refused(folder, "training data in several parts", "pairs")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"fairseq": "x", "folder": "y"}, r"give one of .* \(got folder, fairseq\)"),
        ({"fairseq": "x", "tokenizer": {"kind": "words"}}, "the dictionaries of data.fairseq are its tokenizers"),
        ({"fairseq": {"path": "x", "language": ["de", "en"]}}, "did you mean 'languages'"),
        ({"fairseq": {"path": "x", "languages": ["de"]}}, "data.fairseq.languages"),
        ({"fairseq": "nowhere"}, "nowhere: there is no such folder"),
    ],
)
def test_wrong_recipes(data: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path, "translation", data)
    assert command(["train", path, "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("subquad: error: ")
    assert re.search(message, error)
