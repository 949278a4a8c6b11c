"""Tokenizers: `train_tokenizer(config, lines)` makes one of any kind, `load_tokenizer(folder)` reads a saved one.

    bpe, unigram    pieces of words, trained on the lines
    bytes           nothing to train
    characters      by frequency
    words           between whitespace, by frequency or from a dictionary of fairseq's
    file            a tokenizer.json of the library `tokenizers`
    sentencepiece   a .model file (needs the package sentencepiece)
    moses-bpe       moses tokenisation, subword-nmt codes, and fairseq's dictionary (needs sacremoses)
    ids             numbers, for data that was tokenised elsewhere
    saved           a folder that `save` wrote

Whether two languages share a vocabulary is decided by the lines that a tokenizer is trained on.
"""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from subquad.config import Options, nearest
from subquad.data.tokenizers.base import Tokenizer, decoded_text, file_bytes, load_saved
from subquad.data.tokenizers.fairseq import FairseqDictionary
from subquad.data.tokenizers.simple import (
    ByteTokenizer,
    CharacterTokenizer,
    IdsTokenizer,
    LabelTokenizer,
    MosesTokenizer,
    WordTokenizer,
)
from subquad.data.tokenizers.subword import ROLES, SMALLEST, SentencePieceTokenizer, SubwordTokenizer

__all__ = ["Tokenizer", "TokenizerConfig", "load_tokenizer", "train_tokenizer"]

Kind = Literal["bpe", "unigram", "bytes", "characters", "words", "file", "sentencepiece", "moses-bpe", "ids", "saved"]
TAKES: dict[str, set[str]] = {
    "bpe": {"vocab_size"},
    "unigram": {"vocab_size"},
    "bytes": set(),
    "characters": {"vocab_size", "min_count"},
    "words": {"dictionary", "vocab_size", "min_count", "multiple"},
    "file": {"path", "symbols"},
    "sentencepiece": {"path"},
    "moses-bpe": {"codes", "dictionary", "language", "vocab_size", "min_count", "multiple"},
    "ids": {"vocab_size", "numbers"},
    "saved": {"path"},
}
CLASSES = (
    ByteTokenizer,
    CharacterTokenizer,
    IdsTokenizer,
    LabelTokenizer,
    MosesTokenizer,
    SentencePieceTokenizer,
    SubwordTokenizer,
    WordTokenizer,
)
DEFAULT_SUBWORDS = 8000


class TokenizerConfig(Options):
    """Options of a tokenizer; each kind takes some of them."""

    kind: Kind = Field("bpe", description="what the symbols are")
    vocab_size: int | None = Field(
        None, ge=5, description="symbols at most, special ones too; default: 8000 pieces, or all words or characters"
    )
    min_count: int = Field(1, ge=1, description="words and characters that are rarer are unknown")
    multiple: int = Field(1, ge=1, description="fill the vocabulary up to a multiple of this; fairseq takes 8")
    path: str | None = Field(None, description="of a tokenizer.json, a SentencePiece model or a saved tokenizer")
    symbols: dict[str, str] = Field(
        default_factory=dict, description="how a tokenizer.json spells bos, pad, eos and unk; default: by usual names"
    )
    numbers: dict[str, int] = Field(
        default_factory=dict, description="of ids: which numbers are pad and eos, and bos and unk where there are such"
    )
    codes: str | None = Field(None, description="file of subword-nmt codes")
    dictionary: str | None = Field(None, description="fairseq's dict.txt; default: made from the lines")
    language: str | None = Field(None, description="for moses tokenisation; null: the text is tokenised already")

    def check(self) -> None:
        takes = TAKES[self.kind]
        if wrong := sorted(self.model_fields_set - takes - {"kind"} - self._defaults()):
            options = f"it takes {', '.join(sorted(takes))}" if takes else "it has no options"
            raise ValueError(f"tokenizer {self.kind} takes no {wrong[0]}; {options}")
        if "path" in takes and self.path is None:
            raise ValueError(f"tokenizer {self.kind} needs path")
        if self.kind == "moses-bpe" and self.codes is None:
            raise ValueError("tokenizer moses-bpe needs codes, the file of subword-nmt; without codes use kind words")
        if self.kind in ("bpe", "unigram") and self.vocab_size is not None and self.vocab_size < SMALLEST:
            raise ValueError(
                f"tokenizer {self.kind} needs vocab_size {SMALLEST} or more: 256 bytes and 4 special symbols"
            )
        if self.kind == "ids":
            self._check_numbers()
        for role in (*self.symbols, *self.numbers):
            if role not in ROLES:
                raise ValueError(f"symbols are {', '.join(ROLES)}, not {role!r}{nearest(role, ROLES)}")

    def _check_numbers(self) -> None:
        if self.vocab_size is None or not {"pad", "eos"} <= self.numbers.keys():
            raise ValueError("tokenizer ids needs vocab_size and numbers, such as numbers: {pad: 1, eos: 2}")
        for role, number in self.numbers.items():
            if not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"numbers.{role} is {number}; a vocabulary of {self.vocab_size} has 0 to {self.vocab_size - 1}"
                )
        if self.numbers["pad"] == self.numbers["eos"]:
            raise ValueError("numbers.pad and numbers.eos must differ: what is padding is not learned")

    def _defaults(self) -> set[str]:
        """Options that say what they would say anyway, as in a config that was written out in full."""
        fields = type(self).model_fields
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in self.model_fields_set}
        return {name for name, default in defaults.items() if getattr(self, name) == default}

    @property
    def reads_lines(self) -> bool:
        """Whether the lines decide about the result."""
        made = self.kind in ("words", "moses-bpe") and self.dictionary is None
        return made or self.kind in ("bpe", "unigram", "characters")

    def paths(self) -> list[Path]:
        """The files that decide about the result."""
        found = [Path(path) for path in (self.path, self.codes, self.dictionary) if path is not None]
        return [inner for path in found for inner in (sorted(path.iterdir()) if path.is_dir() else [path])]


def train_tokenizer(config: TokenizerConfig, lines: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer of a config. Kinds that are loaded leave `lines` alone."""
    if not config.reads_lines:
        return LOADED[config.kind](config)
    iterator = iter(lines)
    beginning = []
    for line in iterator:
        beginning.append(line)
        if line.strip():
            return _trained(config, itertools.chain(beginning, iterator))
    raise ValueError(f"tokenizer {config.kind} needs text to train on; there was none")


def _trained(config: TokenizerConfig, lines: Iterable[str]) -> Tokenizer:
    if config.kind == "characters":
        return CharacterTokenizer.train(lines, config.vocab_size, config.min_count)
    if config.kind == "words":
        return WordTokenizer.train(lines, config.vocab_size, config.min_count, config.multiple)
    if config.kind == "moses-bpe":
        limits = (config.vocab_size, config.min_count, config.multiple)
        return MosesTokenizer.train_dictionary(_codes(config), config.language, lines, *limits)
    return SubwordTokenizer.train(config.kind, lines, config.vocab_size or DEFAULT_SUBWORDS)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that was saved in a folder."""
    return load_saved(Path(folder), {cls.kind: cls for cls in CLASSES})


def _codes(config: TokenizerConfig) -> str:
    assert config.codes is not None
    return decoded_text(file_bytes(config.codes), config.codes)


def _load_json(config: TokenizerConfig) -> Tokenizer:
    assert config.path is not None
    return SubwordTokenizer.from_json(file_bytes(config.path), config.path, config.symbols)


def _load_moses(config: TokenizerConfig) -> Tokenizer:
    assert config.dictionary is not None
    return MosesTokenizer(_codes(config), FairseqDictionary.load(config.dictionary), config.language)


LOADED: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "bytes": lambda _: ByteTokenizer(),
    "file": _load_json,
    "sentencepiece": lambda config: SentencePieceTokenizer(file_bytes(str(config.path))),
    "words": lambda config: WordTokenizer(FairseqDictionary.load(str(config.dictionary))),
    "moses-bpe": _load_moses,
    "ids": lambda config: IdsTokenizer(int(config.vocab_size or 0), config.numbers),
    "saved": lambda config: load_tokenizer(str(config.path)),
}
