"""Text from files to memory-mapped tokens: what is read, what is stored, what is redone, and what is refused."""

import csv
import gzip
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.text.files import read_lines
from subquad.data.text.reading import OnErrorOption, ReadingReport
from subquad.data.text.sources import TextSource, read_samples
from subquad.data.text.store import FORMAT, TokenStore, TokenWriter, dtype_for
from subquad.files import read_metadata, write_metadata

ENGLISH = ["The cat sat.", "", "A dog barked at the cat.", "Two dogs."]
GERMAN = ["Die Katze saß.", "Nichts.", "Ein Hund bellte die Katze an.", "Zwei Hunde."]


def read_pairs(spec: Mapping[str, Any] | Sequence[str | Path] | str | Path) -> Iterator[tuple[str, ...]]:
    """Samples of two fields, from the options of a source, one path or several."""
    if not isinstance(spec, Mapping):
        paths = [spec] if isinstance(spec, str | Path) else spec
        spec = {"files": [str(path) for path in paths]}
    return read_samples(TextSource.parse("source", spec), ("source", "target"))


def write(path: Path, lines: list[str], end: str = "\n") -> str:
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "t.en", ENGLISH), write(tmp_path / "t.de", GERMAN)]


# ---------------------------------------------------------------------- sources


def write_classes(folder: Path, classes: Mapping[str, list[str]]) -> str:
    for label, texts in classes.items():
        (folder / label).mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / label / f"{number}.txt").write_bytes(text.encode())
    return str(folder)


def test_folders_of_classes_hold_a_text_in_each_file(tmp_path: Path) -> None:
    path = write_classes(tmp_path / "train", {"pos": ["Good.\n\nVery good.\n", "fine"], "neg": ["bad\r\n", ""]})
    (tmp_path / "train" / "pos" / "2.txt").write_bytes(gzip.compress(b"packed\n"))
    (tmp_path / "train" / "pos" / ".hidden").write_text("no")
    (tmp_path / "train" / "about.txt").write_text("no")
    source = TextSource.parse("source", {"files": [path]})
    samples = list(read_samples(source, ("label", "text")))
    assert samples == [
        ("neg", "bad"),
        ("neg", ""),
        ("pos", "Good.\n\nVery good."),
        ("pos", "fine"),
        ("pos", "packed"),
    ]
    (record,) = source.content_records()
    assert source.content_records([record]) == [record]
    (tmp_path / "train" / "pos").rename(tmp_path / "train" / "positive")
    (renamed,) = source.content_records([record])
    assert renamed["sha256"] != record["sha256"], "the label is a part of the content"


@pytest.mark.parametrize(
    ("classes", "fields", "options", "message"),
    [
        ({}, ("label", "text"), {}, "has no folders"),
        ({"pos": []}, ("label", "text"), {}, "pos has no files"),
        ({"pos": ["a"]}, ("source", "target"), {}, "is a folder, but a file is needed"),
        ({"pos": ["a"]}, ("label", "text"), {"columns": [1, 2]}, "columns and header belong to tables"),
        ({"pos": ["a\nbc\ndef"]}, ("label", "text"), {"max_line_bytes": 4}, "0.txt, line 3: longer than 4 bytes"),
    ],
)
def test_folders_that_cannot_be_read(classes, fields, options, message, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    path = write_classes(tmp_path / "made", classes)
    with pytest.raises(ValueError, match=message):
        list(read_samples(TextSource.parse("source", {"files": [path], **options}), fields))


def test_parallel_files(files) -> None:
    assert list(read_pairs(files)) == list(zip(ENGLISH, GERMAN, strict=True))


def test_lines_end_where_they_should(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes("\ufeffone\r\ntwo\u2028still two\x0c\rand here\n\nlast".encode())
    assert list(read_lines(path)) == ["one", "two\u2028still two\x0c\rand here", "", "last"]


def test_gzip_by_content(tmp_path: Path, files) -> None:
    packed = tmp_path / "no-suffix"
    packed.write_bytes(gzip.compress(Path(files[0]).read_bytes()))
    assert list(read_lines(packed)) == ENGLISH
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"no-suffix is damaged"):
        list(read_lines(packed))


def tables(tmp_path: Path) -> Iterator[dict]:
    """The same pairs in every kind of table that needs no package."""
    rows = list(zip(ENGLISH, GERMAN, strict=True))
    yield {"files": [write(tmp_path / "a.tsv", ["\t".join(row) for row in rows])]}
    named = ["de\ten", *("\t".join(row[::-1]) for row in rows)]
    yield {"files": [write(tmp_path / "h.tsv", named)], "columns": ["en", "de"]}
    yield {"files": [write(tmp_path / "b.txt", [f"{d}\tx\t{e}" for e, d in rows])], "format": "tsv", "columns": [3, 1]}
    with (tmp_path / "c.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("en", "de"), *rows])
    yield {"files": [str(tmp_path / "c.csv")], "header": True}
    objects = [json.dumps({"n": 1, "pair": {"en": e, "de": d}}) for e, d in rows]
    yield {"files": [write(tmp_path / "d.jsonl", objects)], "columns": ["pair.en", "pair.de"]}
    packed = tmp_path / "e.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(objects).encode()))
    yield {"files": [str(packed)], "columns": ["pair.en", "pair.de"]}


def test_tables(tmp_path: Path) -> None:
    for options in tables(tmp_path):
        assert list(read_pairs(options)) == list(zip(ENGLISH, GERMAN, strict=True)), options


def test_csv_cells_may_hold_lines_and_quotes(tmp_path: Path) -> None:
    rows = [('a "b", c', "x" * 200_000), ("two\nlines", "y")]
    with (tmp_path / "c.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    assert list(read_pairs(tmp_path / "c.csv")) == rows


def test_a_bare_carriage_return_is_text_and_ends_no_row_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "wild.csv"
    path.write_bytes(b'de,en\r\nEin\rHund,A dog\n"Zwei\rHunde, drei",Two\r\nvier,"fo\r\nur"\n')
    assert list(read_pairs({"files": [str(path)], "columns": ["en", "de"]})) == [
        ("A dog", "Ein\rHund"),
        ("Two", "Zwei\rHunde, drei"),
        ("fo\nur", "vier"),
    ]


def read_noticing(options: Mapping[str, Any], on_error: OnErrorOption = "skip") -> tuple[list, ReadingReport]:
    report = ReadingReport(on_error)
    source = TextSource.parse("source", options)
    return list(read_samples(source, ("source", "target"), report=report)), report


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", b'one,eins\n"two" too,zwei\nthree,drei\n', "a.csv, line 2: not CSV"),
        ("a.csv", b"one,eins\ntwo\nthree,drei\n", "a.csv, line 2: there is no column 2"),
        ("a.csv", b"one,eins\ntw\xff,zwei\nthree,drei\n", "a.csv, line 2: not UTF-8"),
        ("a.csv", b'one,eins\n"two,' + b"z\n" * 40 + b"three,drei\n", "longer than 64 bytes"),
        ("a.tsv", b"one\teins\ntwo\t" + b"z" * 200 + b"\nthree\tdrei\n", "a.tsv, line 2: longer than 64 bytes"),
        ("a.jsonl", b'{"a":"one","b":"eins"}\n{"a":\n{"a":"three","b":"drei"}\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"a":"one","b":"eins"}\n[1]\n{"a":"three","b":"drei"}\n', "line 2: a JSON object is needed"),
        ("a.jsonl", b'{"a":"one","b":"eins"}\n{"a":"x","b":null}\n{"a":"three","b":"drei"}\n', "holds None"),
    ],
)
def test_samples_that_cannot_be_read_stop_or_are_skipped_and_named(tmp_path: Path, name, content, error) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    options = {"files": [str(path)], "max_line_bytes": 64}
    with pytest.raises(ValueError, match=error):
        read_noticing(options, "stop")
    samples, report = read_noticing(options)
    assert samples[0] == ("one", "eins")
    assert samples[-1] == ("three", "drei")
    assert report.unreadable >= 1
    assert error in report.first_errors[0]


def test_a_line_that_is_skipped_takes_its_partner_in_the_other_file_along(tmp_path: Path) -> None:
    english, german = tmp_path / "t.en", tmp_path / "t.de"
    english.write_bytes(b"one\ntw\xff\nthree\n")
    german.write_bytes(b"eins\nzwei\ndrei\n")
    samples, report = read_noticing({"files": [str(english), str(german)]})
    assert samples == [("one", "eins"), ("three", "drei")]
    assert report.unreadable == 1


def test_a_file_of_which_nothing_can_be_read_and_a_wrong_column_stop_all_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["{", "{"])
    with pytest.raises(ValueError, match=r"none of 2 samples can be read: .*line 1: not JSON"):
        read_noticing({"files": [path]})
    path = write(tmp_path / "a.csv", ["de,en", "eins,one"])
    with pytest.raises(ValueError, match="no column 'fr'"):
        read_noticing({"files": [path], "columns": ["en", "fr"]})


@pytest.mark.parametrize(
    ("rows", "columns", "kept"),
    [
        (["de,en", "eins,one"], [2, 1], [("one", "eins")]),
        (["Source,Target", "eins,one"], [], [("eins", "one")]),
        (["id,en_US,pt-br", "7,one,um"], [2, 3], [("one", "um")]),
        (["Hallo,hello", "eins,one"], [], [("Hallo", "hello"), ("eins", "one")]),
        (["de,de", "eins,one"], [], [("de", "de"), ("eins", "one")]),
    ],
)
def test_a_header_is_noticed_when_columns_are_numbers(tmp_path: Path, rows, columns, kept) -> None:
    options = {"files": [write(tmp_path / "a.csv", rows)], "columns": columns}
    samples, report = read_noticing(options, "stop")
    assert samples == kept
    if len(kept) == 2:
        assert report.header is None
    else:
        assert report.header is not None
        assert "a.csv, line 1 names the columns" in report.header
    told, report = read_noticing({**options, "header": False})
    assert len(told) == 2, "whoever says that there is no header is believed"
    assert report.header is None


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", ['{"label": 1, "text": "good"}'])
    assert list(read_pairs(path)) == [("1", "good")]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"de": GERMAN, "en": ENGLISH}), tmp_path / "p.parquet")
    source = {"files": [str(tmp_path / "p.parquet")], "columns": ["en", "de"]}
    assert list(read_pairs(source)) == list(zip(ENGLISH, GERMAN, strict=True))


def test_parquet_names_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pyarrow: pip install 'subquad\[hub\]'"):
        list(read_pairs(tmp_path / "p.parquet"))


def test_hub_names_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"datasets: pip install 'subquad\[hub\]'"):
        list(read_pairs({"files": ["hub:wmt16"], "split": "train"}))


BAD_FILES = [
    ("a.tsv", b"a\tb\nc\n", {}, r"a\.tsv, line 2: there is no column 2, only 1"),
    ("a.tsv", b"en\tde\na\n", {"columns": ["en", "de"]}, "line 2: 1 columns, but the header names 2"),
    ("a.tsv", b"en\tde\na\tb\n", {"columns": ["en", "dee"]}, "no column 'dee'; did you mean 'de'"),
    ("a.tsv", b"en\tde\n", {"columns": ["en", "de"]}, "no samples"),
    ("a.tsv", b"en\ten\na\tb\n", {"columns": ["en", "en"]}, "same name"),
    ("a.tsv", b"a\tb\n", {"columns": ["en", "de"], "header": False}, "numbers from 1"),
    ("a.tsv", b"a\tb\n", {"columns": [0, 1]}, "numbered from 1"),
    ("a.tsv", b"a\tb\n", {"columns": [1]}, "2 columns are needed"),
    ("a.csv", b'a,b\n"c,d\n', {}, "line 2: not CSV"),
    ("a.jsonl", b'{"a": 1}\n{"a"\n', {"columns": ["a", "a"]}, "line 2: not JSON"),
    ("a.jsonl", b"[1]\n", {}, "a JSON object is needed"),
    ("a.jsonl", b'{"a": null, "b": 1}\n', {}, "column 1 holds None"),
    ("a.jsonl", b'{"a": "\\ud800", "b": 1}\n', {}, "half of a surrogate"),
    ("a.tsv", b"", {}, "empty"),
    ("a.tsv", b"a\tb\nc\t\xff\n", {}, r"line 2: not UTF-8, byte 3 is 0xff"),
    ("a.txt", b"a\n", {}, "2 text files are needed"),
    ("a.txt", b"a\n", {"columns": [1, 2]}, "plain text; columns"),
    ("a.txt", b"a\n", {"split": "train"}, "hub data sets"),
    ("a.txt", b"a\n", {"colums": [1, 2]}, "did you mean 'columns'"),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD_FILES)
def test_bad_tables(tmp_path: Path, name, content, options, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_pairs({"files": [str(tmp_path / name)], **options}))
    assert "\n" not in str(caught.value)


def test_bad_parallel_files(tmp_path: Path, files) -> None:
    short = write(tmp_path / "short", ["one"])
    for pair in ([files[0], short], [short, files[0]]):
        with pytest.raises(ValueError, match=r"same number of lines: .* has \d lines, .* has \d lines"):
            list(read_pairs(pair))
    with pytest.raises(ValueError, match="missing: there is no such file"):
        list(read_pairs([files[0], tmp_path / "missing"]))
    with pytest.raises(ValueError, match="is a folder"):
        list(read_pairs([files[0], tmp_path]))
    empty = [write(tmp_path / name, []) for name in ("e1", "e2")]
    with pytest.raises(ValueError, match="empty, there are no samples"):
        list(read_pairs(empty))


# ---------------------------------------------------------------------- stores


@settings(max_examples=60, deadline=None)
@given(
    sentences=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=20), max_size=20),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_store_gives_back_what_was_written(tmp_path_factory, sentences, dtype) -> None:
    path = tmp_path_factory.mktemp("store") / "s"
    with TokenWriter(path, dtype, {"tokenizer": "abc"}) as writer:
        for sentence in sentences:
            writer.add(sentence)
    store = TokenStore.open(path)
    assert [row.tolist() for row in (store[i] for i in range(len(store)))] == sentences
    assert store.lengths.tolist() == [len(sentence) for sentence in sentences]
    assert store.lengths.dtype == np.int64
    assert store.total == sum(map(len, sentences))
    assert (store.meta["tokenizer"], store.meta["dtype"]) == ("abc", dtype)
    store.verify()
    assert sorted(file.name for file in path.parent.iterdir()) == ["s.index", "s.json", "s.tokens"]
    assert pickle.loads(pickle.dumps(store)).lengths.tolist() == store.lengths.tolist()


def write_sentences(path: Path, sentences: list) -> None:
    with TokenWriter(path, "uint16") as writer:
        for sentence in sentences:
            writer.add(sentence)


def small_store(path: Path) -> TokenStore:
    write_sentences(path, [[4, 5, 6], np.array([7])])
    return TokenStore.open(path)


def test_store_indices(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    assert store[-1].tolist() == [7]
    assert not store[0].flags.writeable
    with pytest.raises(IndexError, match="2 sentences"):
        store[2]
    assert (tmp_path / "s.tokens").read_bytes() == bytes([4, 0, 5, 0, 6, 0, 7, 0])


def test_store_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(ValueError, match="no token store"):
        TokenStore.open(path)
    store = small_store(path)
    tokens = tmp_path / "s.tokens"
    tokens.write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"s\.tokens is damaged: its checksum"):
        store.verify()
    tokens.write_bytes(bytes(7))
    with pytest.raises(ValueError, match="7 bytes instead of 8"):
        TokenStore.open(path)
    tokens.unlink()
    with pytest.raises(ValueError, match="missing"):
        TokenStore.open(path)
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe"):
        TokenStore.open(path)


def test_a_failed_writer_leaves_the_old_store(tmp_path: Path) -> None:
    small_store(tmp_path / "s")
    for wrong in ([65536], [-1], np.array([1 << 40])):
        with pytest.raises(ValueError, match="must be 0 to 65535"):
            write_sentences(tmp_path / "s", [[1, 2], wrong])
    assert TokenStore.open(tmp_path / "s").total == 4
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="uint16 or uint32"):
        TokenWriter(tmp_path / "s", "int8")
    assert (dtype_for(65536), dtype_for(65537)) == ("uint16", "uint32")


def test_opening_reads_almost_nothing(tmp_path: Path) -> None:
    """10^9 tokens, in files with holes: opening them and taking one sentence needs no memory for them."""
    path, count, total = tmp_path / "big", 10**6, 10**9
    small_store(path)
    meta = read_metadata(tmp_path / "big.json", FORMAT, "token store")
    write_metadata(tmp_path / "big.json", meta | {"tokens": total, "sentences": count})
    os.truncate(tmp_path / "big.tokens", 2 * total)
    (tmp_path / "big.index").write_bytes(np.linspace(0, total, count + 1).astype("<i8").tobytes())
    store = TokenStore.open(path)
    assert len(store) == count
    assert store[count - 1].tolist() == [0] * 1000
    assert int(store.lengths.sum()) == total
