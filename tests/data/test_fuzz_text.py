"""Text that nobody meant, as files and on standard input; folders of fairseq's with any bytes in them."""

import csv
import gzip
import io
import json
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.cli.main import run as command
from subquad.data.fairseq.index import open_indexed
from subquad.data.text import sources
from subquad.data.text.files import read_lines
from subquad.data.text.sources import TextSource
from tests.data.fairseq_files import FORMS, write_dictionary
from tests.fuzzing import WORDS, called, fuzzed, kept_promise

LINES = ["the cat sat", "a dog barks", "two cats"] * 4
HARD = [b"\xff\xfe", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1f\x8b", b"\r", "\u2028".encode(), "مرحبا".encode()]


def raw_lines(more: int = 6) -> st.SearchStrategy[bytes]:
    """Lines of text, of bytes that are no text, and of what other programs trip over."""
    words = st.sampled_from([*HARD, *(word.encode() for word in WORDS)])
    parts = words | st.text(max_size=12).map(lambda text: text.encode(errors="replace")) | st.binary(max_size=8)
    line = st.lists(parts, max_size=4).map(b" ".join)
    return st.lists(line, max_size=more).map(b"\n".join)


@fuzzed(40)
@given(
    content=raw_lines(),
    name=st.sampled_from(["t.txt", "t.tsv", "t.csv", "t.jsonl", "t.txt.gz", "t.parquet", "t.npy", "t.npz", "t.idx"]),
    kind=st.sampled_from(["words", "characters", "bytes", "bpe", "unigram", "ids"]),
    packed=st.booleans(),
)
def test_files_of_any_bytes(tmp_path: Path, capsys, content: bytes, name: str, kind: str, packed: bool) -> None:
    """They are prepared, or refused by one line; what was prepared can be opened and counted."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if packed else content)
    words = ["--train", path, "--samples", "text", "--tokenizer", kind, "--vocab-size", "300", "--workers", "1"]
    if called(capsys, "data", "prepare", tmp_path / "out", *words)[0] == 0:
        shown = called(capsys, "data", "stats", tmp_path / "out", "--json")
        assert json.loads(shown[1])["splits"]["train"]["samples"] >= 1


@fuzzed(30)
@given(rows=st.lists(st.recursive(st.none() | st.text(max_size=4) | st.floats(), st.lists) | st.text(), max_size=4))
def test_tables_of_any_json(tmp_path: Path, capsys, rows: list[object]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    called(capsys, "data", "prepare", tmp_path / "out", "--train", path, "--columns", "text", "--samples", "text")


def test_numbers_and_depths_without_end(tmp_path: Path, capsys) -> None:
    for content in ("[" * 100_000, '{"a": ' * 5000, '{"text": ' + "9" * 5000 + "}"):
        (tmp_path / "t.jsonl").write_text(content)
        words = ["--train", tmp_path / "t.jsonl", "--samples", "text"]
        code, _, err = called(capsys, "data", "prepare", tmp_path / "out", *words)
        assert code == 1
        assert "t.jsonl, line 1: not JSON" in err


def test_a_bomb_of_one_line_is_refused(tmp_path: Path) -> None:
    """Reading stops at the limit, whatever the file would unpack to."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"fine\n" + bytes(1 << 24)))
    lines = read_lines(path, max_bytes=1 << 20)
    assert next(lines) == "fine"
    with pytest.raises(ValueError, match=r"bomb\.gz, line 2: longer than 1,048,576 bytes"):
        next(lines)


@pytest.mark.parametrize("name", ["long.txt", "long.tsv", "long.csv", "long.jsonl"])
def test_a_line_of_any_format_has_a_limit_by_default(tmp_path: Path, name: str) -> None:
    """Of a line of 200 MiB in a small gzip file only the 32 MiB of the limit are unpacked, and nothing is built."""
    with gzip.open(tmp_path / name, "wb", 1) as file:
        for _ in range(200):
            file.write(b"x" * (1 << 20))
    source = TextSource.parse("source", {"files": [str(tmp_path / name)]})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"{name}, line 1: longer than 33,554,432 bytes") as caught:
            list(sources.read_samples(source, ("text",)))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_the_limit_of_a_line_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("12345\n123\n")
    read = partial(TextSource.parse, "source")
    allowed = read({"files": [str(path)], "max_line_bytes": 6})
    assert list(sources.read_samples(allowed, ("text",))) == [("12345",), ("123",)]
    with pytest.raises(ValueError, match="line 1: longer than 5 bytes; split it, or raise max_line_bytes"):
        list(sources.read_samples(read({"files": [str(path)], "max_line_bytes": 5}), ("text",)))
    table = tmp_path / "a.csv"
    table.write_text('"' + "ab\n" * 10 + '"\n')
    limit = csv.field_size_limit()
    with pytest.raises(ValueError, match=r"a\.csv, line 7: longer than 20 bytes"):
        list(sources.read_samples(read({"files": [str(table)], "max_line_bytes": 20}), ("text",)))
    assert csv.field_size_limit() >= limit  # that of the process, which others need
    small, large = (read({"files": [str(path)], "max_line_bytes": size}) for size in (6, 7))
    assert small.reading_options() == large.reading_options()  # prepared text does not depend on it


# ---------------------------------------------------------------------- translation


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has barely learned, with symbols for all bytes."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("train.a", "train.b", "valid.a", "valid.b"):
        (folder / name).write_text("".join(f"{line}\n" for line in LINES))
    stack = {"layers": 1, "heads": 2, "ffn_dim": 16, "mixer": {"name": "lightconv", "kernel_size": 3}}
    splits = {split: [str(folder / f"{split}.{side}") for side in "ab"] for split in ("train", "valid")}
    recipe = {
        "task": "translation",
        "data": {"splits": splits, "tokenizer": {"kind": "bytes"}},
        "model": {"preset": "translation_small", "dim": 16, "encoder": stack, "decoder": stack},
        "schedule": {"kind": "constant", "lr": 1e-3},
        "train": {"updates": 1, "budget": {"max_tokens": 256}},
        "decode": {"max_len_b": 4, "beam": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def translated(capsys, run: Path, content: bytes, *words: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return called(capsys, "translate", run, *words)


@fuzzed(25)
@given(content=raw_lines(), nbest=st.sampled_from([1, 2]))
def test_every_line_of_any_bytes_has_its_translations(run: Path, capsys, content: bytes, nbest: int) -> None:
    code, out, _ = translated(capsys, run, content, "--nbest", str(nbest))
    assert code == 0
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    numbers = [int(line.split("\t")[0]) for line in out.split("\n")[:-1]] if nbest > 1 else None
    if numbers is None:
        assert out.count("\n") == len(lines)
    else:
        assert sorted(set(numbers)) == list(range(1, len(lines) + 1))


def test_a_line_of_a_megabyte_is_cut(run: Path, capsys) -> None:
    code, out, err = translated(capsys, run, b"x" * (1 << 20) + b"\nfine\n")
    assert code == 0
    assert out.count("\n") == 2
    assert "warning: 1 lines were cut at 12,000 tokens" in err


# ---------------------------------------------------------------------- fairseq's folders


@pytest.mark.parametrize("form", FORMS)
def test_indexes_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, form: str) -> None:
    folder = tmp_path_factory.mktemp(form)
    FORMS[form](folder / "good", [[4, 5, 2], [4, 2]])
    good = {end: (folder / f"good.{end}").read_bytes() for end in ("idx", "bin")}
    absurd = [b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), (2**40).to_bytes(8, "little")]

    @fuzzed(60)
    @given(
        end=st.sampled_from(["idx", "bin"]),
        begin=st.integers(0, 80),
        length=st.integers(0, 16),
        new=st.binary(max_size=16) | st.sampled_from(absurd),
    )
    def check(end: str, begin: int, length: int, new: bytes) -> None:
        content = {**good, end: good[end][:begin] + new + good[end][begin + length :]}
        for name, value in content.items():
            (folder / f"train.{name}").write_bytes(value)
        found = kept_promise(lambda: open_indexed(folder / "train.idx"))
        if found is not None:
            assert found.offsets[-1] == len(found.ids)

    check()


@fuzzed(15)
@given(content=st.binary(max_size=40), dictionary=raw_lines(3))
def test_folders_of_any_bytes(tmp_path: Path, capsys, content: bytes, dictionary: bytes) -> None:
    write_dictionary(tmp_path / "dict.txt", ["a", "b"])
    FORMS["mmap"](tmp_path / "train", [[4, 5, 2], [4, 2]])
    (tmp_path / "train.bin").write_bytes((content * 10)[:10])
    called(capsys, "data", "stats", tmp_path)
    (tmp_path / "dict.txt").write_bytes(dictionary)
    called(capsys, "data", "stats", tmp_path)
