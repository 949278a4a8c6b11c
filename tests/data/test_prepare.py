"""Preparing text: what the stores hold, what is redone, what is counted, and what is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from subquad.cli.data import data as data_app
from subquad.cli.main import run as command
from subquad.data.text import encode
from subquad.data.text.prepare import PrepareStatus, TextDataConfig, prepare_text
from subquad.data.text.sources import TextSource
from subquad.data.text.stats import text_stats
from subquad.data.text.store import PreparedText, open_prepared
from subquad.data.tokenizers import TokenizerConfig, build_tokenizer
from subquad.files import CHECKSUM, write_metadata
from tests.data.test_sources import ENGLISH, GERMAN, write


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "t.en", ENGLISH), write(tmp_path / "t.de", GERMAN)]


def translation(files: list[str], **options) -> TextDataConfig:
    given = {"splits": {"train": files}, "tokenizer": {"kind": "bpe", "vocab_size": 280}, **options}
    return TextDataConfig.parse("data", given)


def texts(prepared: PreparedText, split: str, side: str) -> list[str]:
    tokenizer, store = prepared.tokenizer(side), prepared.store(split, side)
    return [tokenizer.decode(store[i]) for i in range(len(store))]


def test_translation(tmp_path: Path, files) -> None:
    seen: list[PrepareStatus] = []
    prepared = prepare_text(translation(files), tmp_path / "out", report=seen.append)
    kept = [0, 2, 3]  # the second has an empty side
    assert texts(prepared, "train", "source") == [ENGLISH[i] for i in kept]
    assert texts(prepared, "train", "target") == [GERMAN[i] for i in kept]
    split = prepared.description["splits"]["train"]
    assert (split["read"], split["samples"], split["skipped"]) == (4, 3, {"empty": 1, "over-long": 0})
    assert split["inputs"][0]["size"] == Path(files[0]).stat().st_size
    assert (seen[-1].stage, seen[-1].samples, seen[-1].bytes_read) == ("train", 4, seen[-1].bytes_total)
    again = open_prepared(tmp_path / "out")
    assert again.description == prepared.description
    assert again.store("train", "source").meta["tokenizer"] == again.tokenizer("source").fingerprint()


def test_shared_and_separate_vocabularies(tmp_path: Path, files) -> None:
    words = {"kind": "words"}
    shared = prepare_text(translation(files, tokenizer=words), tmp_path / "shared")
    apart = prepare_text(translation(files, tokenizer=words, target_tokenizer=words), tmp_path / "apart")
    assert shared.tokenizer("source").fingerprint() == shared.tokenizer("target").fingerprint()
    assert shared.tokenizer("source").encode("Katze") != [3]
    assert apart.tokenizer("source").encode("Katze") == [3]
    assert apart.tokenizer("target").encode("Katze") != [3]


def test_over_long_samples_are_counted(tmp_path: Path, files) -> None:
    config = translation(files, tokenizer={"kind": "words"}, max_length=4, keep_empty=True)
    prepared = prepare_text(config, tmp_path / "o")
    assert prepared.description["splits"]["train"]["skipped"] == {"empty": 0, "over-long": 1}
    assert prepared.store("train", "source").lengths.tolist() == [3, 0, 2]
    with pytest.raises(ValueError, match="split train: no sample is left of 4: 1 empty, 3 over-long"):
        prepare_text(translation(files, tokenizer={"kind": "bytes"}, max_length=1), tmp_path / "p")


def test_language_model_keeps_empty_lines(tmp_path: Path, files) -> None:
    options = {"sample_kind": "text", "splits": {"train": files[0]}, "tokenizer": {"kind": "words"}}
    prepared = prepare_text(TextDataConfig.parse("data", options), tmp_path / "a")
    assert texts(prepared, "train", "text") == ENGLISH
    dropped = prepare_text(TextDataConfig.parse("data", {**options, "keep_empty": False}), tmp_path / "b")
    assert texts(dropped, "train", "text") == [line for line in ENGLISH if line]


def test_classification(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", ["pos\tgood", "neg\tbad", "pos\tfine"])
    valid = write(tmp_path / "valid.tsv", ["neg\tawful", "neutral\twell"])
    options = {"sample_kind": "labelled", "tokenizer": {"kind": "bytes"}}
    prepared = prepare_text(TextDataConfig.parse("data", {**options, "splits": {"train": train}}), tmp_path / "o")
    assert [int(prepared.store("train", "label")[i][0]) for i in range(3)] == [1, 0, 1]
    assert prepared.tokenizer("label").size == 2
    both = TextDataConfig.parse("data", {**options, "splits": {"train": train, "valid": valid}})
    with pytest.raises(ValueError, match="split valid: sample 2: no class is called 'neutral'"):
        prepare_text(both, tmp_path / "o")
    assert open_prepared(tmp_path / "o").splits == ("train",)


def test_processes_keep_the_order(tmp_path: Path, monkeypatch) -> None:
    lines = [f"line {i} " + "x" * (i % 17) for i in range(5000)]
    path = write(tmp_path / "t", lines)
    monkeypatch.setattr(encode, "CHUNK_SAMPLES", 100)
    options = {"sample_kind": "text", "splits": {"train": path}, "tokenizer": {"kind": "bpe", "vocab_size": 280}}
    config = TextDataConfig.parse("data", options)
    parallel = prepare_text(config, tmp_path / "two", workers=2)
    assert texts(parallel, "train", "text") == lines
    alone = prepare_text(config, tmp_path / "one", workers=1)
    assert alone.store("train", "text").meta == parallel.store("train", "text").meta


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_only_what_changed_is_done_again(tmp_path: Path, files) -> None:
    valid = [write(tmp_path / "v.en", ["cat"]), write(tmp_path / "v.de", ["Katze"])]
    splits = {"train": files, "valid": valid}
    out = tmp_path / "out"

    def changes(**options) -> dict[str, str]:
        return dict(prepare_text(translation(files, **{"splits": splits, **options}), out).changes)

    same = {"tokenizer": "reused", "train": "reused", "valid": "reused"}
    assert changes() == {"tokenizer": "new", "train": "new", "valid": "new"}
    assert changes() == same
    os.utime(valid[0], (1, 1))
    assert changes() == same  # touched, but not changed
    write(Path(valid[0]), ["cats"])
    assert changes() == {**same, "valid": "input changed"}
    assert changes(max_length=50) == {**same, "train": "options changed", "valid": "options changed"}
    write(Path(files[0]), [*ENGLISH[:-1], "Three wolves howled and howled."])
    again = changes(max_length=50)
    assert again == {"tokenizer": "input changed", "train": "input and tokenizer changed", "valid": "tokenizer changed"}
    again = changes(max_length=50, tokenizer={"kind": "bytes"})
    assert again["train"] == again["valid"] == "tokenizer changed"
    (out / "train.target.tokens").write_bytes(b"")
    assert changes(max_length=50, tokenizer={"kind": "bytes"}) == {**same, "train": "its files are damaged"}
    flip(out / "train.source.tokens")
    with pytest.raises(ValueError, match=r"train\.source\.tokens is damaged: its checksum differs"):
        open_prepared(out).verify()
    assert changes(max_length=50, tokenizer={"kind": "bytes"}) == {**same, "train": "its files are damaged"}
    text = (out / "valid.source.json").read_text()
    (out / "valid.source.json").write_text(text.replace('"sentences": 1', '"sentences": 2'))
    with pytest.raises(ValueError, match=r"valid\.source\.json is damaged: its content and its checksum differ"):
        open_prepared(out).store("valid", "source")
    described = json.loads((out / "data.json").read_text())
    del described[CHECKSUM]
    write_metadata(out / "data.json", {**described, "splits": {"train": {"read": None, "samples": 3, "skipped": {}}}})
    with pytest.raises(ValueError, match=r"data\.json is damaged: the counts of train are not numbers"):
        open_prepared(out)
    (out / "data.json").write_text("{")
    assert set(changes(max_length=50, tokenizer={"kind": "bytes"}).values()) == {"new"}


def test_another_split_can_be_added(tmp_path: Path, files) -> None:
    out = tmp_path / "out"
    options = {"tokenizer": {"kind": "bytes"}}
    prepare_text(translation(files, **options), out)
    added = prepare_text(translation(files, splits={"test": files}, **options), out)
    assert added.splits == ("train", "test")
    saved = {"kind": "saved", "path": str(out / "tokenizer")}
    changed = prepare_text(translation(files, splits={"test": files}, tokenizer=saved), out)
    assert changed.splits == ("train", "test")  # the same tokenizer by another name
    saved = {"kind": "saved", "path": saved_words(tmp_path)}
    other = prepare_text(translation(files, splits={"test": files}, tokenizer=saved), out)
    assert other.splits == ("test",)
    assert other.changes["train"].startswith("removed")
    assert not (out / "train.source.tokens").exists()


def saved_words(tmp_path: Path) -> str:
    build_tokenizer(TokenizerConfig(kind="words"), ENGLISH + GERMAN).save(tmp_path / "words")
    return str(tmp_path / "words")


def test_an_interrupted_preparation_is_noticed(tmp_path: Path, files) -> None:
    """A new tokenizer beside old tokens must not be read as if they belonged together."""
    out = tmp_path / "out"
    prepare_text(translation(files), out)
    prepared = open_prepared(out)
    prepare_text(translation(files, tokenizer={"kind": "bytes"}), out)
    with pytest.raises(ValueError, match="prepare the data again"):
        prepared.tokenizer("source")
    with pytest.raises(ValueError, match="prepare the data again"):
        prepared.store("train", "source")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": {"valid": "x"}}, "trained on the split `train`"),
        ({"splits": {}}, "splits"),
        ({"splits": {"../x": "x"}}, "letters, digits"),
        ({"sample_kind": "text", "target_tokenizer": {"kind": "bytes"}}, "is for pairs"),
        ({"tokenizer": {"kind": "bytes", "vocab_size": 9}}, "does not accept vocab_size"),
        ({"max_length": 0}, "max_length"),
        ({"tokeniser": {}}, "did you mean 'tokenizer'"),
        ({"splits": {"train": {"file": "x"}}}, "did you mean 'files'"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TextDataConfig.parse("data", {"splits": {"train": "x"}, **options})
    assert "\n" not in str(caught.value)


def test_folders_that_hold_something_else(tmp_path: Path, files) -> None:
    with pytest.raises(ValueError, match="no prepared data"):
        open_prepared(tmp_path)
    prepared = prepare_text(translation(files), tmp_path / "out")
    other = TextDataConfig(sample_kind="text", splits={"train": TextSource(files=(files[0],))})
    with pytest.raises(ValueError, match="holds pairs"):
        prepare_text(other, tmp_path / "out")
    with pytest.raises(ValueError, match="no split 'tain'; did you mean 'train'"):
        prepared.store("tain", "source")
    with pytest.raises(ValueError, match="at least 1"):
        prepare_text(translation(files), tmp_path / "out", workers=0)


# ---------------------------------------------------------------------- statistics and the command line


def test_statistics(tmp_path: Path) -> None:
    path = write(tmp_path / "t", ["a b a", "", "a <unk>", "c " * 97])
    options = {"sample_kind": "text", "splits": {"train": path}, "tokenizer": {"kind": "words", "vocab_size": 6}}
    found = text_stats(prepare_text(TextDataConfig.parse("data", options), tmp_path / "out"), most=2)
    side = found["splits"]["train"]["fields"]["text"]
    assert (side["samples"], side["tokens"], side["empty"]) == (4, 102, 1)
    assert side["length"] == {"min": 0, "mean": 25.5, "median": 2, "p90": 97, "p95": 97, "p99": 97, "max": 97}
    assert (side["unknown"], side["unknown_rate"]) == (2, 2 / 102)
    assert [(item["token"], item["count"]) for item in side["most_frequent"]] == [("c", 97), ("a", 3)]
    assert found["vocabularies"]["text"] == {"kind": "words", "size": 6}


app = typer.Typer()
app.add_typer(data_app, name="data")


def call(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_commands(tmp_path: Path, files) -> None:
    pair = ["--train", files[0], "--train", files[1], "--vocab-size", "280"]
    printed = call("prepare", tmp_path / "out", *pair)
    assert "train        3" in printed
    assert "1 empty" in printed
    assert "tokenizer: 280 symbols (new)" in printed
    fewer = call("prepare", tmp_path / "fewer", *pair[:4], "--tokenizer", "words", "--vocab-size", "8000")
    assert re.search(r"tokenizer: \d+ symbols of 8,000 asked for: the text has no more \(new\)", fewer)
    assert json.loads(call("prepare", tmp_path / "out", *pair, "--json"))["changes"]["train"] == "reused"
    printed = call("stats", tmp_path / "out")
    assert "4 samples read, skipped: 1 empty" in printed
    assert "source" in printed
    stats = json.loads(call("stats", tmp_path / "out", "--json"))
    assert stats["splits"]["train"]["fields"]["target"]["samples"] == 3


def test_unreadable_lines_and_a_header_are_said(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text('de,en\neins,one\n"zwei" und,two\n   ,three\nvier,four\n')
    words = ["--train", str(path), "--tokenizer", "bytes"]
    with pytest.raises(ValueError, match=r"pairs.csv, line 3: not CSV"):
        call("prepare", tmp_path / "out", *words)
    printed = call("prepare", tmp_path / "out", *words, "--on-error", "skip")
    assert "1 empty, 1 unreadable" in printed, "white space is no sentence"
    assert "pairs.csv, line 3: not CSV" in printed
    assert "pairs.csv, line 1 names the columns (de, en)" in printed
    made = json.loads(call("prepare", tmp_path / "out", *words, "--on-error", "skip", "--json"))
    assert made["changes"]["train"] == "reused"
    assert made["splits"]["train"]["samples"] == 2
    assert made["splits"]["train"]["read"] == 4
    with pytest.raises(ValueError, match=r"line 3: not CSV"):
        call("prepare", tmp_path / "out", *words, "--on-error", "stop")


def test_prepare_from_yaml(tmp_path: Path, files) -> None:
    path = tmp_path / "data.yaml"
    path.write_text(f"sample_kind: text\nsplits:\n  train: {files[0]}\ntokenizer:\n  kind: words\n")
    made = json.loads(call("prepare", tmp_path / "out", "--config", path, "--tokenizer", "bytes", "--json"))
    assert made["tokenizers"]["tokenizer"]["size"] == 260
    with pytest.raises(ValueError, match="nothing to prepare"):
        call("prepare", tmp_path / "out")
    with pytest.raises(ValueError, match="there is no file of options"):
        call("prepare", tmp_path / "out", "--config", tmp_path / "none.yaml")


def test_a_status_is_one_line() -> None:
    status = PrepareStatus("train", 1000, 20_000, 25, 100, 2.0)
    assert status.message == "train: 1,000 samples, 20,000 tokens, 500 samples/s"


# ---------------------------------------------------------------------- trust


def test_stats_notice_a_flipped_bit(tmp_path: Path, files) -> None:
    prepare_text(translation(files), tmp_path / "out")
    path = tmp_path / "out" / "train.source.tokens"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"train\.source\.tokens is damaged: its checksum differs"):
        call("stats", tmp_path / "out")


def test_what_a_killed_preparation_left_is_removed(tmp_path: Path, files) -> None:
    """Files of a process that is gone; those of one that lives, and files of the user's, stay."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    out = tmp_path / "out"
    (out / "tokenizer").mkdir(parents=True)
    left = [out / f".train.source.tokens.{gone.pid}", out / f".data.json.{gone.pid}"]
    left.append(out / "tokenizer" / f".kind.json.{gone.pid}")
    kept = [out / f".train.target.index.{os.getppid()}", out / ".hidden", out / "notes.12", out / f"x.{gone.pid}"]
    for path in (*left, *kept):
        path.write_text("half")
    prepare_text(translation(files), out)
    assert not any(path.exists() for path in left)
    assert all(path.read_text() == "half" for path in kept)
    prepare_text(translation(files), out)
    assert sorted(path.name for path in out.glob(".*")) == sorted(path.name for path in kept if path.name[0] == ".")


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
def test_data_cannot_act_on_a_terminal(tmp_path: Path, terminal: bool, capsys, monkeypatch) -> None:
    hostile = "\x1b[2J\x9b31m\u202egpj.exe\u2028"
    path = tmp_path / "a.txt"
    path.write_text(f"{hostile} {hostile} word\n" * 3)
    options = {"sample_kind": "text", "splits": {"train": [str(path)]}, "tokenizer": {"kind": "words"}}
    prepare_text(TextDataConfig.parse("data", options), tmp_path / "out")
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert command(["data", "stats", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2J" in shown
    assert "\\u202egpj.exe" in shown
    assert not set(shown) & {"\x9b", "\u202e", "\u2028"}
    assert "\x1b[2J" not in shown
    assert command(["data", "prepare", str(tmp_path / "new"), "--train", f"{hostile}.txt", "--train", "b"]) == 1
    message = capsys.readouterr().err
    assert "\\x1b[2J" in message
    assert not set(message) & {"\x9b", "\u202e", "\u2028"}
