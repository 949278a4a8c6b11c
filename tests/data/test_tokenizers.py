"""Tokenizers: texts come back, numbers are stable, what is saved is what is loaded, and mistakes are said."""

import itertools
import json
import os
import random
import shutil
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import subquad
from subquad.data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer, load_tokenizer
from subquad.data.tokenizers.fairseq import FairseqDictionary, SubwordCodes, post_process
from subquad.data.tokenizers.simple import LabelTokenizer
from subquad.data.tokenizers.subword import FilledTokenizer
from tests.originals.files import FOLDER
from tests.originals.text import check_dictionary, check_post_process

LINES = [
    "The cat sat on the mat.",
    "Die Katze saß auf der Matte, und der Hund bellte.",
    "the dog barked at 12:30; nobody — not even the cat — cared",
    "ein Hund und eine Katze",
] * 5
TRAINED = ("bpe", "unigram", "bytes", "characters", "words")
CODES = "#version: 0.2\nl o\nlo w</w>\nn e\nne w\nnew e\n"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def trained(kind: str, lines: list[str] = LINES, **options: Any) -> Tokenizer:
    if kind in ("bpe", "unigram"):
        options.setdefault("vocab_size", 300)
    return build_tokenizer(TokenizerConfig.parse("tokenizer", {"kind": kind, **options}), lines)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: trained(kind) for kind in TRAINED}


# ---------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
@example("")
@example(" ")
@example("  two spaces before, and after  ")
@example("<s> <pad> </s> <unk>")
@example("line\nend\r\n\ttab\u2028\x00")
@example("e\u0301 é 👩\u200d👩 ﷽")
def test_any_text_comes_back(tokenizers, kind, text) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 < number < tokenizer.size for number in ids)
    assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXT, min_size=1))
def test_characters_come_back_when_they_were_seen(texts) -> None:
    tokenizer = trained("characters", ["x", *texts])
    assert tokenizer.size == 4 + len(set("x".join([*texts, ""])))
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(" ".join(LINES).split())))
def test_words_come_back(tokenizers, words) -> None:
    assert tokenizers["words"].decode(tokenizers["words"].encode("  ".join(words))) == " ".join(words)


@pytest.mark.parametrize("kind", TRAINED)
def test_special_symbols_are_left_out(tokenizers, kind) -> None:
    tokenizer = tokenizers[kind]
    assert (tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk) == (0, 1, 2, 3)
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode([0, *ids, 2, 1, 1]) == "the cat"
    assert tokenizer.decode([]) == ""


def test_a_word_has_the_same_pieces_at_the_beginning(tokenizers) -> None:
    assert tokenizers["bpe"].encode("cat cat") == 2 * tokenizers["bpe"].encode("cat")


def test_subwords_shorten_text_and_respect_the_size(tokenizers) -> None:
    for kind in ("bpe", "unigram"):
        assert tokenizers[kind].size <= 300
        assert len(tokenizers[kind].encode(LINES[0])) < len(LINES[0])


# ---------------------------------------------------------------------- vocabularies


def test_words_are_sorted_by_count_and_limited() -> None:
    lines = ["b b b a a c <unk> <unk>", "a d </s>"]
    tokenizer = trained("words", lines)
    assert [tokenizer.id_to_token(i) for i in range(tokenizer.size)] == [*("<s>", "<pad>", "</s>", "<unk>"), *"abcd"]
    assert tokenizer.encode("d a <unk> zebra </s> <pad>") == [7, 4, 3, 3, 3, 3]
    assert tokenizer.decode([7, 3]) == "d <unk>"
    assert trained("words", lines, min_count=2).size == 6
    assert trained("words", lines, vocab_size=7).size == 7
    assert trained("words", lines, multiple=8, min_count=2).size == 8


def test_an_unknown_character_stays_visible() -> None:
    tokenizer = trained("characters", ["aab"], vocab_size=5)
    assert tokenizer.encode("ab") == [4, 3]
    assert tokenizer.decode([4, 3]) == "a\ufffd"


def test_labels() -> None:
    assert LabelTokenizer.train(["10", "9", "9", "-1"]).names == ["-1", "9", "10"]
    labels = LabelTokenizer.train(["pos", "neg", "pos "])
    assert [labels.encode(name) for name in ("neg", "pos")] == [[0], [1]]
    assert labels.decode([1]) == "pos"
    with pytest.raises(ValueError, match="no class is called 'poss'; did you mean 'pos'"):
        labels.encode("poss")


# ---------------------------------------------------------------------- saving


@pytest.mark.parametrize("kind", TRAINED)
def test_saved_and_loaded(tmp_path: Path, tokenizers, kind) -> None:
    tokenizer = tokenizers[kind]
    tokenizer.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    again = build_tokenizer(TokenizerConfig(kind="saved", path=str(tmp_path / "t")))
    for other in (loaded, again):
        assert other.fingerprint() == tokenizer.fingerprint()
        assert other.size == tokenizer.size
        for line in [*LINES[:4], "zebra <s>"]:
            assert other.encode(line) == tokenizer.encode(line)
    trained("characters", ["other"]).save(tmp_path / "t")
    assert load_tokenizer(tmp_path / "t").fingerprint() != tokenizer.fingerprint()


def test_scores_of_many_digits_survive_saving(tmp_path: Path) -> None:
    words = [f"{a}{b}{c}" for a in "abcde" for b in ("na", "lo", "ti") for c in ("st", "re", "mun", "g")]
    tokenizer = trained("unigram", [" ".join(words[i:] + words[::3]) for i in range(40)], vocab_size=330)
    for number in range(2):
        tokenizer.save(tmp_path / str(number))
        tokenizer = load_tokenizer(tmp_path / str(number))


def test_fingerprints_tell_tokenizers_apart(tokenizers) -> None:
    others = [trained("words", LINES[:1]), trained("characters", LINES[:1]), trained("bpe", LINES[:1])]
    prints = [tokenizer.fingerprint() for tokenizer in [*tokenizers.values(), *others]]
    assert len(set(prints)) == len(prints)


def test_damage_is_noticed(tmp_path: Path, tokenizers) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    tokenizers["words"].save(tmp_path)
    path = tmp_path / "dict.txt"
    path.write_text(path.read_text().replace("cat", "rat"))
    with pytest.raises(ValueError, match="damaged: its fingerprint"):
        load_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="incomplete"):
        load_tokenizer(tmp_path)
    (tmp_path / "kind.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------------- loaded kinds


def test_a_tokenizer_json_of_others(tmp_path: Path) -> None:
    """Its own numbers stay; special symbols are found by their usual names, and added when they are missing."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers, processors

    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "cat": 3, "the": 4}
    engine = Engine(models.WordLevel(vocabulary, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(["[PAD]", "[UNK]", "[CLS]"])
    engine.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    engine.enable_truncation(1)
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    tokenizer = build_tokenizer(TokenizerConfig(kind="file", path=str(path)))
    assert (tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk, tokenizer.size) == (2, 0, 5, 1, 6)
    assert tokenizer.encode("the cat the") == [4, 3, 4]
    assert tokenizer.encode("the dog") == [4, 1]
    assert tokenizer.decode([2, 4, 3, 5, 0]) == "the cat"
    assert "[UNK]" in tokenizer.decode([4, 1])
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").eos == 5
    named = build_tokenizer(TokenizerConfig(kind="file", path=str(path), special_tokens={"eos": "cat"}))
    assert named.eos == 3
    with pytest.raises(ValueError, match="no token '<end>'"):
        build_tokenizer(TokenizerConfig(kind="file", path=str(path), special_tokens={"eos": "<end>"}))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        build_tokenizer(TokenizerConfig(kind="file", path=str(path)))


def test_a_tokenizer_of_a_model_with_more_rows_that_reads_a_beginning(tmp_path: Path, tokenizers) -> None:
    bpe = tokenizers["bpe"]
    content, roles = bpe.files()["tokenizer.json"], bpe.settings()
    begun = FilledTokenizer(content, "x", roles, bpe.size + 7, begun=True)
    begun.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.size == bpe.size + 7
    assert loaded.encode("a b") == loaded.encode_batch(["a b"])[0] == [bpe.bos, *bpe.encode("a b")]
    assert loaded.decode(loaded.encode("a b")) == "a b"
    assert FilledTokenizer(content, "x", roles, bpe.size, begun=False).encode("a b") == bpe.encode("a b")
    with pytest.raises(ValueError, match="tokens, but the model has 9"):
        FilledTokenizer(content, "x", roles, 9, begun=True)


def test_sentencepiece_names_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "m.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"sentencepiece: pip install 'subquad\[text\]'"):
        build_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "m.model")))


def test_moses_names_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    (tmp_path / "codes").write_text(CODES)
    with pytest.raises(ValueError, match=r"sacremoses: pip install 'subquad\[text\]'"):
        trained("moses-bpe", codes=str(tmp_path / "codes"), language="en")


def test_pieces_with_a_fairseq_dictionary(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text(CODES)
    (tmp_path / "dict.txt").write_text("low 9\nnewe@@ 5\nr 5\n")
    codes, dictionary = str(tmp_path / "codes"), str(tmp_path / "dict.txt")
    tokenizer = trained("moses-bpe", codes=codes, dictionary=dictionary)
    assert tokenizer.encode("low newer slow") == [4, 5, 6, 3, 4]
    assert tokenizer.decode([5, 6, 4, 2]) == "newer low"
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("newer") == [5, 6]
    made = trained("moses-bpe", ["low low newer"], codes=codes, multiple=8)
    assert [made.id_to_token(i) for i in range(4, 8)] == ["low", "newe@@", "r", "madeupword0000"]


# ---------------------------------------------------------------------- fairseq's text


@pytest.mark.parametrize(("name", "check"), [("dictionary", check_dictionary), ("post_process", check_post_process)])
def test_golden_text(name, check) -> None:
    check(json.loads((FOLDER / "fairseq" / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("version", "end"), [("#version: 0.2\n", ""), ("#version: 0.1\n", " "), ("", " ")], ids=["0.2", "0.1", "none"]
)
def test_subword_codes(version, end) -> None:
    """The earliest merge goes first, whatever its place in the word; both versions of the file give the same."""
    merges = ["x x", "a b", "b c</w>" if not end else "c </w>", "ab c</w>", "b c</w>"]
    codes = SubwordCodes(version + "\n".join(merges) + "\n", "codes")
    assert codes.split_line("abc") == ["abc"]
    assert codes.split_line("xxxxx q") == ["xx@@", "xx@@", "x", "q"]
    assert codes.split_line("cab") == (["c@@", "ab"] if end else ["c@@", "a@@", "b"])
    assert codes.split_line("") == []


@pytest.mark.parametrize("seed", range(20))
def test_merges_are_applied_in_the_order_in_which_they_were_learned(seed: int) -> None:
    """As subword-nmt writes it: the best pair of all, wherever it occurs, again and again."""
    draw = random.Random(seed)
    symbols, lines = ["a", "b", "a</w>", "b</w>"], dict[str, int]()
    while len(lines) < 20:
        first, second = draw.choice(symbols), draw.choice(symbols)
        lines.setdefault(f"{first} {second}", len(lines))
        symbols.append(first + second)
    codes = SubwordCodes("#version: 0.2\n" + "\n".join(lines) + "\n", "codes")
    for _ in range(20):
        word = "".join(draw.choices("ab", k=draw.randint(2, 20)))
        parts = [*word[:-1], word[-1] + "</w>"]
        while known := [pair for pair in itertools.pairwise(parts) if " ".join(pair) in lines]:
            best, at = min(known, key=lambda pair: lines[" ".join(pair)]), 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
        assert "".join(parts).removesuffix("</w>") == word
        assert [piece.removesuffix("@@") for piece in codes.split_line(word)] == "\n".join(parts)[:-4].split("\n")


def test_a_word_without_end_is_split_in_good_time() -> None:
    """Looking at all of it for every merge took minutes; one of 32 MB, hours."""
    draw, letters = random.Random(0), string.ascii_lowercase[:20]
    merges = [f"{first} {second}" for first in letters for second in letters]
    merges += [f"{first}{second} {third}" for first in letters for second in letters for third in letters]
    codes = SubwordCodes("\n".join(["#version: 0.2", *merges]), "codes")
    begun = time.monotonic()
    word = "".join(draw.choices(letters, k=100_000))
    assert "".join(codes.split_line(word)).replace("@@", "") == word
    assert time.monotonic() - begun < 20


def test_subword_codes_refuse_what_they_are_not() -> None:
    with pytest.raises(ValueError, match="line 3: a merge is two symbols"):
        SubwordCodes("#version: 0.2\na b\na b c\n", "codes")
    with pytest.raises(ValueError, match="no merges"):
        SubwordCodes("#version: 0.2\n", "codes")


def test_dictionary_files(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("the 5\n\u00a0 3\nthe 2 #fairseq:overwrite\n")
    dictionary = FairseqDictionary.load(path)
    assert dictionary.symbols[4:] == ["the", "\u00a0", "the"]
    assert dictionary.index("the") == 6
    assert dictionary.text() == path.read_text()
    twice = ("the 5\nthe 2\n", "line 2: 'the' occurs twice")
    for text, message in [twice, ("the\n", "line 1"), ("a x\n", "line 1")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            FairseqDictionary.load(path)
    with pytest.raises(ValueError, match="no such file"):
        FairseqDictionary.load(tmp_path / "missing")
    with pytest.raises(ValueError, match="'bpe'"):
        post_process("a", "bpe")


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bpee"}, "bpe"),
        ({"kind": "bytes", "vocab_size": 300}, "bytes does not accept vocab_size; it has no options"),
        ({"kind": "bpe", "path": "x"}, "bpe does not accept path; it accepts vocab_size"),
        ({"kind": "bpe", "vocab_size": 100}, "vocab_size of 260 or more"),
        ({"kind": "file"}, "file needs the option path"),
        ({"kind": "moses-bpe"}, "needs codes"),
        ({"kind": "file", "path": "x", "special_tokens": {"ens": "</s>"}}, "did you mean 'eos'"),
        ({"vocabsize": 3}, "did you mean 'vocab_size'"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TokenizerConfig.parse("tokenizer", options)
    assert "\n" not in str(caught.value)


def test_a_config_written_in_full_is_read_again() -> None:
    for config in (TokenizerConfig(), TokenizerConfig(kind="bytes"), TokenizerConfig(kind="words", min_count=3)):
        assert TokenizerConfig.parse("tokenizer", config.model_dump(mode="json")) == config


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters", "words"])
def test_no_text_to_train_on(kind) -> None:
    for lines in ([], ["", " "]):
        with pytest.raises(ValueError, match="needs text to train on"):
            trained(kind, lines)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "words"])
def test_a_mistake_in_the_lines_comes_through(kind) -> None:
    def lines():
        yield from LINES
        raise ValueError("file, line 7: not UTF-8")

    with pytest.raises(ValueError, match=r"^file, line 7: not UTF-8$"):
        build_tokenizer(TokenizerConfig(kind=kind), lines())


@pytest.mark.parametrize("kind", ["file", "sentencepiece"])
def test_missing_files(kind) -> None:
    with pytest.raises(ValueError, match="nowhere: there is no such file"):
        build_tokenizer(TokenizerConfig(kind=kind, path="nowhere"))


# ---------------------------------------------------------------------- a new kind

NEW_KIND = '''"""Words in the opposite order."""

from subquad.data.tokenizers.fairseq import WordTokenizer


class BackwardsTokenizer(WordTokenizer):
    """Words from the last to the first."""

    kind = "backwards"

    def encode(self, text):
        return super().encode(text)[::-1]
'''
USE = """
from pathlib import Path
from subquad.data.tokenizers import TokenizerConfig, build_tokenizer, load_tokenizer
from subquad.data.text.prepare import TextDataConfig, prepare_text

folder = Path.cwd()
tokenizer = build_tokenizer(TokenizerConfig.parse("tokenizer", {"kind": "backwards", "min_count": 1}), ["a b b"])
assert tokenizer.encode("a b") == [4, 5], tokenizer.encode("a b")
tokenizer.save(folder / "saved")
assert load_tokenizer(folder / "saved").encode("a b") == [4, 5]
(folder / "train.txt").write_text("a b b")
options = {"sample_kind": "text", "splits": {"train": ["train.txt"]}, "tokenizer": {"kind": "backwards"}}
prepared = prepare_text(TextDataConfig.parse("data", options), folder / "out")
assert prepared.store("train", "text")[0].tolist() == [4, 4, 5]
"""


def test_a_new_kind_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(Path(subquad.__file__).parent, tmp_path / "subquad")
    (tmp_path / "subquad/data/tokenizers/backwards.py").write_text(NEW_KIND)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, check=True)
