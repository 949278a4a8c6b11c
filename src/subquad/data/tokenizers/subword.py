"""Pieces of words: BPE and unigram through the library `tokenizers`, trained here or from a file; SentencePiece models.

What is trained here works on bytes, so that no text is unknown and every text comes back as it was. A space is put
before each text and taken away again: a word has the same pieces at the beginning as inside.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from subquad.data.tokenizers.base import SPECIAL_SYMBOLS, Tokenizer
from subquad.packages import require

ROLES = ("bos", "pad", "eos", "unk")
SMALLEST = len(SPECIAL_SYMBOLS) + 256
SPELLINGS = {
    "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
}
"""How tokenizers of others spell the special symbols, the most usual first."""


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`. Special symbols that a text happens to spell stay text."""

    kind = "subword"

    def __init__(self, content: bytes, what: str, numbers: Mapping[str, int]) -> None:
        """content: a tokenizer.json. It is kept as it is: reading and writing scores changes their last digits."""
        self._content = content
        engine = _engine(content, what)
        engine.no_padding()
        engine.no_truncation()
        engine.encode_special_tokens = True  # spelled in a text, they are text
        self._engine = engine
        self.bos, self.pad, self.eos, self.unk = (numbers[role] for role in ROLES)
        # Numbers may have gaps; what embeds them needs room up to the largest.
        self.size = max(engine.get_vocab().values()) + 1
        special = {number for number, token in engine.get_added_tokens_decoder().items() if token.special}
        self._hidden = (special | {self.bos, self.pad, self.eos}) - {self.unk}

    @classmethod
    def train(cls, kind: str, lines: Iterable[str], vocab_size: int) -> Self:
        """kind: bpe or unigram. A small text may give fewer symbols than `vocab_size`."""
        common: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special_tokens": list(SPECIAL_SYMBOLS),
            "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
            "show_progress": False,
        }
        trainer: trainers.Trainer
        if kind == "bpe":
            engine, trainer = Engine(models.BPE()), trainers.BpeTrainer(**common)
        else:
            engine, trainer = Engine(models.Unigram()), trainers.UnigramTrainer(unk_token=SPECIAL_SYMBOLS[3], **common)
        engine.normalizer = normalizers.Prepend(" ")
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        engine.train_from_iterator(lines, trainer)
        return cls(engine.to_str().encode(), kind, {role: number for number, role in enumerate(ROLES)})

    @classmethod
    def from_json(cls, data: bytes, what: str, symbols: Mapping[str, str]) -> Self:
        """A tokenizer.json. `symbols` spells special symbols by role; those that the file lacks are added."""
        engine = _engine(data, what)
        numbers = {}
        for role in ROLES:
            spelled = (symbols[role],) if role in symbols else SPELLINGS[role]
            known = [text for text in spelled if engine.token_to_id(text) is not None]
            if not known and role in symbols:
                raise ValueError(f"{what} has no symbol {symbols[role]!r}, which symbols.{role} names")
            if not known:
                engine.add_special_tokens([AddedToken(spelled[0], special=True, normalized=False)])
            numbers[role] = engine.get_vocab()[(known or spelled)[0]]
        return cls(engine.to_str().encode(), what, numbers)

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        shown = [number for number in map(int, ids) if number not in self._hidden]
        return self._engine.decode(shown, skip_special_tokens=False)

    def symbol(self, number: int) -> str:
        return self._engine.id_to_token(number) or f"<{number}>"

    def settings(self) -> dict[str, Any]:
        return {role: getattr(self, role) for role in ROLES}

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._content}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:
        return cls(files["tokenizer.json"], "tokenizer.json", settings)


def _engine(data: bytes, what: str) -> Engine:
    try:
        return Engine.from_buffer(data)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{what} is no tokenizer.json: {error}") from None


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with its own numbers; special symbols that it lacks come after its pieces."""

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        sentencepiece = require("sentencepiece", "tokenizer sentencepiece", "text")
        self._model = model
        try:
            self._engine = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"no SentencePiece model: {error}") from None
        self.size = self._engine.get_piece_size()
        for role in ROLES:
            number = getattr(self._engine, f"{role}_id")()
            if number < 0:
                number, self.size = self.size, self.size + 1
            setattr(self, role, number)

    def encode(self, text: str) -> list[int]:
        return list(self._engine.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._engine.decode(self._text_ids(ids))

    def symbol(self, number: int) -> str:
        if number < self._engine.get_piece_size():
            return self._engine.id_to_piece(number)
        return next(SPELLINGS[role][0] for role in ROLES if getattr(self, role) == number)

    def settings(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, bytes]:
        return {"sentencepiece.model": self._model}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(files["sentencepiece.model"])
