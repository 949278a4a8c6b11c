"""Tokenizers of others, held against their own programs: SentencePiece, sacremoses, subword-nmt."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from subquad.data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer, load_tokenizer
from subquad.data.tokenizers.fairseq import SubwordCodes
from tests.data.test_tokenizers import LINES, TEXT

AWKWARD = [
    "",
    "   ",
    "Don't stop: it's \"quoted\", isn't it?",
    "a well-known e-mail - from 3.5 to 1,000.00 -- costs $5!",
    "<s> </s> <unk> <pad> @-@ &amp; &#124; | [x] 50%",
    "no\u00a0break, thin\u2009space, \u3000wide\ttab\r\n",
    "Straße, cafe\u0301, ﬁn, Ⅷ, 日本語のテキスト。 👩\u200d👩",
    "l'été d'après-midi, U.S.A. Mr. Smith...",
    "low</w> lower@@ newest@@ @@ @",
]

# ---------------------------------------------------------------------- SentencePiece


@pytest.fixture(scope="module", params=["unigram", "bpe-with-pad", "char-without-bos"])
def sentencepiece_model(request: pytest.FixtureRequest) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    kind, _, special = request.param.partition("-")
    options: dict[str, Any] = {"with-pad": {"pad_id": 3}, "without-bos": {"bos_id": -1, "eos_id": 1}}.get(special, {})
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4), model_writer=model, model_type=kind, vocab_size=50, minloglevel=2, **options
    )
    return model.getvalue()


@pytest.fixture
def sentencepiece_pair(sentencepiece_model: bytes, tmp_path: Path) -> tuple[Tokenizer, Any]:
    """Ours, saved and loaded again, and theirs."""
    import sentencepiece

    (tmp_path / "m.model").write_bytes(sentencepiece_model)
    build_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "m.model"))).save(tmp_path / "saved")
    return load_tokenizer(tmp_path / "saved"), sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)


def test_sentencepiece_agrees(sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = sentencepiece_pair

    @settings(max_examples=100, deadline=None)
    @given(text=TEXT)
    def agrees(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode_batch([text, "x"]) == [ids, theirs.encode("x")]
        assert ours.decode([ours.bos, *ids, ours.eos, ours.pad]) == theirs.decode(ids)

    agrees()
    for text in [*AWKWARD, *LINES]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    count = theirs.get_piece_size()
    assert [ours.id_to_token(i) for i in range(count)] == [theirs.id_to_piece(i) for i in range(count)]
    special = {"bos": theirs.bos_id(), "pad": theirs.pad_id(), "eos": theirs.eos_id(), "unk": theirs.unk_id()}
    numbers = [getattr(ours, role) for role in special]
    assert len(set(numbers)) == 4
    for number, (role, known) in zip(numbers, special.items(), strict=True):
        assert number == known if known >= 0 else number >= count, role
    assert ours.size == max(count, *(number + 1 for number in numbers))


def test_a_damaged_sentencepiece_model(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "m.model").write_bytes(b"no model at all")
    with pytest.raises(ValueError, match="no SentencePiece model"):
        build_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "m.model")))


# ---------------------------------------------------------------------- subword-nmt and moses


@pytest.fixture(scope="module")
def codes() -> str:
    """Merges that subword-nmt itself learned."""
    learn = pytest.importorskip("subword_nmt.learn_bpe")
    learned = io.StringIO()
    learn.learn_bpe(io.StringIO("\n".join(LINES)), learned, 60, min_frequency=2)
    return learned.getvalue()


def subword_nmt(codes: str) -> Any:
    return pytest.importorskip("subword_nmt.apply_bpe").BPE(io.StringIO(codes))


@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_subword_codes_agree(codes: str, version: str) -> None:
    assert codes.startswith("#version: 0.2\n")
    if version == "0.1":  # the end of a word is a symbol of its own
        codes = codes.replace("#version: 0.2\n", "").replace("</w>", " </w>")
        codes = "\n".join(line for line in codes.split("\n") if line.count(" ") == 1)
    ours, theirs = SubwordCodes(codes, "codes"), subword_nmt(codes)

    @settings(max_examples=200, deadline=None)
    @given(text=st.one_of(TEXT, st.text("thecatdogundein @<w>/ \u00a0\n")))
    def agrees(text: str) -> None:
        assert " ".join(ours.split_line(text)) == theirs.segment(text)

    agrees()
    for text in [*AWKWARD, *LINES]:
        assert " ".join(ours.split_line(text)) == theirs.segment(text)


@pytest.fixture(scope="module", params=["en", "de", "fr", None])
def moses(request: pytest.FixtureRequest, codes: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(ours, text -> pieces and pieces -> text by the programs themselves)."""
    sacremoses = pytest.importorskip("sacremoses")
    language, folder = request.param, tmp_path_factory.mktemp("moses")
    (folder / "codes").write_text(codes)
    options = {"kind": "moses-bpe", "codes": str(folder / "codes"), "language": language}
    ours = build_tokenizer(TokenizerConfig.parse("tokenizer", options), LINES[:2])
    bpe = subword_nmt(codes)

    def pieces(text: str) -> list[str]:
        """As fairseq: tokenised, cut by process_line, read at whitespace."""
        if language is not None:
            tokenizer = sacremoses.MosesTokenizer(language)
            text = tokenizer.tokenize(text, aggressive_dash_splits=True, return_str=True, escape=True)
        return bpe.process_line(text).split()

    def words(found: list[str]) -> str:
        text = re.sub("@@( |$)", "", " ".join(found))
        return text if language is None else sacremoses.MosesDetokenizer(language).detokenize(text.split())

    return ours, pieces, words


def test_moses_and_codes_agree(moses: Any) -> None:
    ours, pieces, words = moses
    known = {ours.id_to_token(number): number for number in range(4, ours.size)}

    @settings(max_examples=100, deadline=None)
    @given(text=st.one_of(TEXT, st.lists(st.sampled_from([*" ".join(LINES).split(), *AWKWARD])).map(" ".join)))
    @example("@-@")
    def agrees(text: str) -> None:
        expected = pieces(text)
        assert ours.split_pieces(text) == expected
        ids = ours.encode(text)
        assert ids == [known.get(piece, ours.unk) for piece in expected]
        assert ours.decode([*ids, ours.eos]) == words([ours.id_to_token(number) for number in ids])

    agrees()
    for text in [*AWKWARD, *LINES]:
        assert ours.split_pieces(text) == pieces(text)
    assert ours.decode(ours.encode(LINES[0])) == LINES[0]
