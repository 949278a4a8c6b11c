"""Subword tokenizers: BPE and unigram models through the library `tokenizers`, and SentencePiece models.

The models that are trained here work on bytes, so no text is unknown and decoding gives every text back. Encoding puts
a space before each text and decoding removes it, so a word has the same pieces at the beginning of a text as inside.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from subquad.data.tokenizers import NUM_SPECIAL, ROLES, SPECIAL_TOKENS, Tokenizer
from subquad.files import read_bytes
from subquad.packages import require

if TYPE_CHECKING:
    from subquad.data.tokenizers import TokenizerConfig

DEFAULT_VOCAB_SIZE = 8000
MIN_VOCAB_SIZE = NUM_SPECIAL + 256
SPELLINGS = {
    "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
}
"""How other tokenizers spell the special tokens; the most usual spelling comes first."""
PANIC = "PanicException"  # of pyo3, which does not export it
REPLACEMENTS = ("Replace", "Prepend")
NO_REPLACEMENTS = ("model", "added_tokens")
MAX_GROWTH = 1000
"""Replacements that follow one another multiply: three of a thousand characters make a gigabyte of one letter."""


class SubwordTokenizer(Tokenizer):
    """Any tokenizer of the library `tokenizers`. Special tokens that a text happens to spell are treated as text."""

    def __init__(self, content: bytes, path: str, special_ids: Mapping[str, int]) -> None:
        """content: a tokenizer.json, which is kept byte by byte, because writing it anew would round its scores."""
        self._content = content
        engine = _parse_json(content, path)
        engine.no_padding()
        engine.no_truncation()
        engine.encode_special_tokens = True  # a special token that a text spells is text
        self._engine = engine
        self.bos, self.pad, self.eos, self.unk = (special_ids[role] for role in ROLES)
        # The ids may have gaps; an embedding needs rows up to the largest one.
        self.size = max(engine.get_vocab().values()) + 1
        special = {number for number, token in engine.get_added_tokens_decoder().items() if token.special}
        self._not_decoded = (special | {self.bos, self.pad, self.eos}) - {self.unk}

    def encode(self, text: str) -> list[int]:
        with _panics_as_errors():
            return self._engine.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with _panics_as_errors():
            return [found.ids for found in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        shown = [number for number in map(int, ids) if number not in self._not_decoded]
        with _panics_as_errors():
            return self._engine.decode(shown, skip_special_tokens=False)

    def id_to_token(self, number: int) -> str:
        return self._engine.id_to_token(number) or f"<{number}>"

    def settings(self) -> dict[str, Any]:
        return {role: getattr(self, role) for role in ROLES}

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._content}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:
        return cls(files["tokenizer.json"], "tokenizer.json", settings)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turns a panic of the library into a ValueError: pyo3 raises it as an exception that is no Exception.

    The library panics, for example, in a regular expression that backtracks too far.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == PANIC:
            raise ValueError(f"the tokenizer cannot read this text: {error}") from None
        raise


def _parse_json(data: bytes, path: str) -> Engine:
    try:
        if (growth := _growth(json.loads(data))) > MAX_GROWTH:
            raise ValueError(f"it makes a text up to {growth:,} times as long; at most {MAX_GROWTH} are allowed")
        with _panics_as_errors():
            return Engine.from_buffer(data)
    except (Exception, RecursionError) as error:  # the library raises plain Exception
        raise ValueError(f"{path} is no tokenizer.json: {error}") from None


def _growth(content: Any) -> int:
    """How many times as long replacements, one after the other, can make a text; vocabularies replace nothing."""
    if isinstance(content, list):
        return math.prod(map(_growth, content))
    if not isinstance(content, dict):
        return 1
    own = [content.get(name) for name in ("content", "prepend")] if content.get("type") in REPLACEMENTS else []
    longest = max((len(text) for text in own if isinstance(text, str)), default=1)
    return max(1, longest) * math.prod(_growth(part) for name, part in content.items() if name not in NO_REPLACEMENTS)


class BpeTokenizer(SubwordTokenizer):
    """Byte-pair encoding: subwords that are trained by merging the most frequent pairs."""

    kind = "bpe"
    options = frozenset({"vocab_size"})

    @classmethod
    def needs_text(cls, config: "TokenizerConfig") -> bool:  # noqa: ARG003
        return True

    @classmethod
    def check_config(cls, config: "TokenizerConfig") -> None:
        if config.vocab_size is not None and config.vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"tokenizer {cls.kind} needs a vocab_size of {MIN_VOCAB_SIZE} or more: "
                f"256 bytes and {NUM_SPECIAL} special tokens"
            )

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:
        """Trains on `lines`. A small text may give a vocabulary smaller than `vocab_size`."""
        common: dict[str, Any] = {
            "vocab_size": config.vocab_size or DEFAULT_VOCAB_SIZE,
            "special_tokens": list(SPECIAL_TOKENS),
            "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
            "show_progress": False,
        }
        engine, trainer = cls._untrained(common)
        engine.normalizer = normalizers.Prepend(" ")
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        engine.train_from_iterator(lines, trainer)
        return cls(engine.to_str().encode(), cls.kind, {role: number for number, role in enumerate(ROLES)})

    @classmethod
    def _untrained(cls, common: Mapping[str, Any]) -> tuple[Engine, trainers.Trainer]:
        return Engine(models.BPE()), trainers.BpeTrainer(**common)


class UnigramTokenizer(BpeTokenizer):
    """A unigram language model: subwords that are trained by likelihood."""

    kind = "unigram"

    @classmethod
    def _untrained(cls, common: Mapping[str, Any]) -> tuple[Engine, trainers.Trainer]:
        return Engine(models.Unigram()), trainers.UnigramTrainer(unk_token=SPECIAL_TOKENS[3], **common)


class JsonTokenizer(SubwordTokenizer):
    """A tokenizer.json of the library `tokenizers`."""

    kind = "file"
    options = frozenset({"path", "special_tokens"})

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:  # noqa: ARG003
        """Loads the file, and adds the special tokens that it lacks."""
        path = str(config.path)
        engine = _parse_json(read_bytes(path), path)
        special_ids = {}
        for role in ROLES:
            given = config.special_tokens.get(role)
            spellings = SPELLINGS[role] if given is None else (given,)
            known = [token for token in spellings if engine.token_to_id(token) is not None]
            if not known and given is not None:
                raise ValueError(f"{path} has no token {given!r}, which special_tokens.{role} names")
            if not known:
                engine.add_special_tokens([AddedToken(spellings[0], special=True, normalized=False)])
            special_ids[role] = engine.get_vocab()[(known or spellings)[0]]
        return cls(engine.to_str().encode(), path, special_ids)


class FilledTokenizer(SubwordTokenizer):
    """A tokenizer.json of an imported model, whose tables may have more rows than there are tokens.

    begun: whether the model reads `bos` before every text.
    """

    kind = "filled-file"
    options = None

    def __init__(self, content: bytes, path: str, special_ids: Mapping[str, int], size: int, begun: bool) -> None:
        super().__init__(content, path, special_ids)
        if size < self.size:
            raise ValueError(f"{path} has {self.size:,} tokens, but the model has {size:,}")
        self.size, self.begun = size, begun

    def encode(self, text: str) -> list[int]:
        return [*self._beginning, *super().encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._beginning, *ids] for ids in super().encode_batch(texts)]

    @property
    def _beginning(self) -> list[int]:
        return [self.bos] if self.begun else []

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "size": self.size, "begun": self.begun}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:
        return cls(files["tokenizer.json"], "tokenizer.json", settings, settings["size"], settings["begun"])


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file (needs the package sentencepiece).

    It keeps its own ids. Special tokens that it lacks get the ids after its last piece.
    """

    kind = "sentencepiece"
    options = frozenset({"path"})

    def __init__(self, model: bytes) -> None:
        sentencepiece = require("sentencepiece", "tokenizer sentencepiece", "text")
        self._model = model
        try:
            self._engine = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"this is no SentencePiece model: {error}") from None
        self.size = self._engine.get_piece_size()
        for role in ROLES:
            number = getattr(self._engine, f"{role}_id")()
            if number < 0:
                number, self.size = self.size, self.size + 1
            setattr(self, role, number)

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:  # noqa: ARG003
        return cls(read_bytes(str(config.path)))

    def encode(self, text: str) -> list[int]:
        return list(self._engine.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._engine.decode(self._without_special(ids))

    def id_to_token(self, number: int) -> str:
        if number < self._engine.get_piece_size():
            return self._engine.id_to_piece(number)
        return next(SPELLINGS[role][0] for role in ROLES if getattr(self, role) == number)

    def files(self) -> dict[str, bytes]:
        return {"sentencepiece.model": self._model}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(files["sentencepiece.model"])
