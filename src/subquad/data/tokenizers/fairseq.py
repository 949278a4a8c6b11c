"""Text as fairseq's models read it: its dictionary, subword-nmt codes, and the tokenizers `words` and `moses-bpe`."""

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from subquad.data.tokenizers import NUM_SPECIAL, SPECIAL_TOKENS, UNK, Tokenizer
from subquad.files import decode_utf8, read_bytes
from subquad.packages import require

if TYPE_CHECKING:
    from subquad.data.tokenizers import TokenizerConfig

OVERWRITE = "#fairseq:overwrite"
END_OF_WORD = "</w>"
JOINER = "@@"
CACHED_WORDS = 200_000
COUNT = re.compile(r"-?\d{1,18}")
"""How often a symbol occurs: numbers of thousands of digits take long to read, and Python refuses to."""


class FairseqDictionary:
    """Symbols with their counts. The first four are <s>, <pad>, </s> and <unk>, each with a count of one."""

    def __init__(self) -> None:
        self.symbols: list[str] = []
        self.counts: list[int] = []
        self.ids: dict[str, int] = {}
        for symbol in SPECIAL_TOKENS:
            self.add(symbol)

    def __len__(self) -> int:
        return len(self.symbols)

    def add(self, symbol: str, count: int = 1, overwrite: bool = False) -> int:
        """Adds to the count of a symbol and returns its id.

        A symbol that is new gets the next free id. With `overwrite`, a known symbol gets a new id too.
        """
        if symbol in self.ids and not overwrite:
            self.counts[self.ids[symbol]] += count
        else:
            self.ids[symbol] = len(self.symbols)
            self.symbols.append(symbol)
            self.counts.append(count)
        return self.ids[symbol]

    def index(self, symbol: str) -> int:
        """Returns the id of a symbol, or the id of <unk> if the dictionary does not have it."""
        return self.ids.get(symbol, UNK)

    def word_ids(self) -> dict[str, int]:
        """Returns the ids of the symbols that a text may contain.

        <s>, <pad> and </s> are left out: a text that spells </s> must not end its own sentence.
        """
        return {symbol: number for symbol, number in self.ids.items() if number >= UNK}

    def finalize(self, threshold: int = -1, nwords: int = -1, padding_factor: int = 8) -> None:
        """Sorts the symbols by count, the most frequent first, and symbols of equal counts by their spelling.

        Symbols with a count below `threshold` are dropped, and so are the rarest ones beyond `nwords`, which includes
        the special tokens and is no limit if it is 0 or less. Then the dictionary is filled up with madeupword0000,
        madeupword0001, ... until its size is a multiple of `padding_factor`.
        """
        words = sorted(zip(self.symbols[NUM_SPECIAL:], self.counts[NUM_SPECIAL:], strict=True))
        words.sort(key=lambda word: -word[1])
        if nwords > 0:
            words = words[: max(0, nwords - NUM_SPECIAL)]
        special = zip(self.symbols[:NUM_SPECIAL], self.counts[:NUM_SPECIAL], strict=True)
        kept = [*special, *(word for word in words if word[1] >= threshold)]
        self.symbols = [symbol for symbol, _ in kept]
        self.counts = [count for _, count in kept]
        self.ids = {symbol: number for number, symbol in enumerate(self.symbols)}
        made_up = 0
        while padding_factor > 1 and len(self) % padding_factor:
            self.add(f"madeupword{made_up:04d}", 0)
            made_up += 1

    @classmethod
    def from_counts(cls, words: Counter[str], config: "TokenizerConfig") -> Self:
        """Returns the dictionary of counted words, limited by `vocab_size`, `min_count` and `multiple`."""
        dictionary = cls()
        for word, count in words.items():
            dictionary.add(word, count)
        dictionary.finalize(config.min_count, config.vocab_size or -1, config.multiple)
        return dictionary

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a dict.txt, which has a symbol and its count in each line."""
        return cls.parse(read_bytes(path), str(path))

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Returns the dictionary in the content of a dict.txt. Error messages name `path`."""
        dictionary = cls()
        lines = decode_utf8(data, path).removesuffix("\n").split("\n")
        for number, line in enumerate(lines if data else [], 1):
            word, _, field = line.rstrip().rpartition(" ")
            overwrite = field == OVERWRITE
            if overwrite:
                word, _, field = word.rpartition(" ")
            if not word or not COUNT.fullmatch(field):
                raise ValueError(f"{path}, line {number}: 'symbol count' is needed, got {line[:80]!r}")
            if word in dictionary.ids and not overwrite:
                raise ValueError(f"{path}, line {number}: {word[:80]!r} occurs twice, which needs the mark {OVERWRITE}")
            dictionary.add(word, int(field), overwrite)
        return dictionary

    def text(self) -> str:
        """Returns the content of a dict.txt."""
        words = zip(self.symbols[NUM_SPECIAL:], self.counts[NUM_SPECIAL:], strict=True)
        # If two symbols have the same spelling, the later one is used, and the file has to mark it.
        seen: set[str] = set(SPECIAL_TOKENS)
        lines = []
        for symbol, count in words:
            lines.append(f"{symbol} {count} {OVERWRITE}\n" if symbol in seen else f"{symbol} {count}\n")
            seen.add(symbol)
        return "".join(lines)


# ---------------------------------------------------------------------- subwords


def _marked_words(mark: str) -> Callable[[str], str]:
    """Joins pieces in which a mark stands for the space between words."""
    return lambda text: text.replace(" ", "").replace(mark, " ").strip()


def _joined_words(joiner: str) -> Callable[[str], str]:
    """Joins pieces in which a joiner says that the word goes on."""
    return lambda text: f"{text} ".replace(joiner, "").rstrip()


POST_PROCESS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "subword_nmt": _joined_words("@@ "),
    "@@ ": _joined_words("@@ "),
    "@@": _joined_words("@@"),
    "sentencepiece": _marked_words("\u2581"),
    "wordpiece": _marked_words("_"),
    "letter": _marked_words("|"),
    "_EOW": _marked_words("_EOW"),
    "silence": lambda text: re.sub(" +", " ", text.replace("<SIL>", "")).strip(),
}


def post_process(pieces: str, kind: str | None) -> str:
    """Joins the pieces of a line into words, as fairseq's --post-process (formerly --remove-bpe) does."""
    if kind is None:
        return pieces
    if kind not in POST_PROCESS:
        raise ValueError(f"pieces cannot be joined by {kind!r}; known: {', '.join(map(repr, POST_PROCESS))}")
    return POST_PROCESS[kind](pieces)


class SubwordCodes:
    """Merges that subword-nmt learned. They are applied in its order: the merge that was learned first comes first.

    In version 0.1 of the file the end of a word is a symbol of its own; in 0.2 it is a part of the last character.
    """

    def __init__(self, text: str, path: str) -> None:
        """text: the content of the file. path: the name of the file, for messages."""
        lines = text.removesuffix("\n").split("\n")
        header = re.match(r"#version: (\d{1,9})\.(\d{1,9})", lines[0])
        self.end_is_a_symbol = header is None or (int(header[1]), int(header[2])) < (0, 2)
        self.ranks: dict[tuple[str, str], int] = {}
        for number, line in enumerate(lines):
            if (number == 0 and header is not None) or not line.strip():
                continue
            pair = tuple(line.strip("\r ").split(" "))
            if len(pair) != 2:
                raise ValueError(f"{path}, line {number + 1}: a merge is two symbols, got {line[:80]!r}")
            self.ranks.setdefault(pair, number)
        if not self.ranks:
            raise ValueError(f"{path} holds no merges")
        self._cache: dict[str, list[str]] = {}

    def split_line(self, line: str) -> list[str]:
        """Returns the pieces of a line; only spaces separate its words. A piece inside of a word ends with @@."""
        pieces: list[str] = []
        for word in filter(None, line.strip("\r\n ").split(" ")):
            if word not in self._cache:
                if len(self._cache) > CACHED_WORDS:
                    self._cache.clear()  # names and numbers never end, but memory does
                parts = self._split_word(word)
                self._cache[word] = [*(part + JOINER for part in parts[:-1]), parts[-1]]
            pieces += self._cache[word]
        return pieces

    def _split_word(self, word: str) -> list[str]:
        if len(word) == 1:
            return [word]
        parts = [*word, END_OF_WORD] if self.end_is_a_symbol else [*word[:-1], word[-1] + END_OF_WORD]
        parts = self._merge(parts)
        if parts[-1] == END_OF_WORD:
            return parts[:-1]
        return [*parts[:-1], parts[-1].removesuffix(END_OF_WORD)]

    def _merge(self, parts: list[str]) -> list[str]:
        """Joins the pair that was learned first wherever it occurs, from left to right, until no pair is known.

        Pairs wait in a heap, since a word may have millions of characters: looking at all of it for every merge would
        take hours.
        """
        count = len(parts)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        waiting = [
            (rank, at) for at, pair in enumerate(itertools.pairwise(parts)) if (rank := self.ranks.get(pair, -1)) >= 0
        ]
        heapq.heapify(waiting)
        while waiting:
            best, joined = waiting[0][0], []
            while waiting and waiting[0][0] == best:
                at = heapq.heappop(waiting)[1]
                right = after[at]
                if right < count and self.ranks.get((parts[at], parts[right])) == best:  # neither has been joined since
                    parts[at], parts[right] = parts[at] + parts[right], ""
                    after[at] = after[right]
                    if after[at] < count:
                        before[after[at]] = at
                    joined.append(at)
            for at in (place for end in joined for place in (before[end], end)):
                if at >= 0 and after[at] < count and (pair := (parts[at], parts[after[at]])) in self.ranks:
                    heapq.heappush(waiting, (self.ranks[pair], at))
        return [part for part in parts if part]


# ---------------------------------------------------------------------- tokenizers


class WordTokenizer(Tokenizer):
    """Words between whitespace, the most frequent first, from the text or from a dict.txt of fairseq.

    A text that contains <unk>, as WikiText does, gets the id of the unknown word for it.
    """

    kind = "words"
    options = frozenset({"dictionary", "vocab_size", "min_count", "multiple"})

    def __init__(self, dictionary: FairseqDictionary) -> None:
        self.dictionary = dictionary
        self.size = len(dictionary)
        self._ids = dictionary.word_ids()

    @classmethod
    def needs_text(cls, config: "TokenizerConfig") -> bool:
        return config.dictionary is None

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:
        if config.dictionary is not None:
            return cls(FairseqDictionary.load(config.dictionary))
        words: Counter[str] = Counter()
        for line in lines:
            words.update(line.split())
        return cls(FairseqDictionary.from_counts(words, config))

    def split_words(self, text: str) -> str:
        """Returns the text with spaces between the words that become tokens or are split into pieces."""
        return text

    def encode(self, text: str) -> list[int]:
        ids = self._ids
        return [ids.get(word, UNK) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.id_to_token(number) for number in self._without_special(ids))

    def id_to_token(self, number: int) -> str:
        return self.dictionary.symbols[number]

    def files(self) -> dict[str, bytes]:
        return {"dict.txt": self.dictionary.text().encode()}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(FairseqDictionary.parse(files["dict.txt"], "dict.txt"))


class MosesTokenizer(WordTokenizer):
    """Moses tokenisation, subword-nmt codes and a dict.txt, as fairseq's published models use (needs sacremoses).

    Without a language the text is expected to be tokenised already, and decoding leaves it so.
    """

    kind = "moses-bpe"
    options = frozenset({"codes", "dictionary", "language", "vocab_size", "min_count", "multiple"})

    def __init__(self, codes: str, dictionary: FairseqDictionary, language: str | None) -> None:
        super().__init__(dictionary)
        self.codes_text, self.language = codes, language
        self.codes = SubwordCodes(codes, "the subword-nmt codes")
        self._moses = _Moses(language) if language is not None else None

    @classmethod
    def check_config(cls, config: "TokenizerConfig") -> None:
        if config.codes is None:
            raise ValueError("tokenizer moses-bpe needs codes, a file of subword-nmt; without codes use kind words")

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:
        assert config.codes is not None
        codes = decode_utf8(read_bytes(config.codes), config.codes)
        if config.dictionary is not None:
            return cls(codes, FairseqDictionary.load(config.dictionary), config.language)
        without_dictionary = cls(codes, FairseqDictionary(), config.language)
        pieces: Counter[str] = Counter()
        for line in lines:
            pieces.update(without_dictionary.split_pieces(line))
        return cls(codes, FairseqDictionary.from_counts(pieces, config), config.language)

    def split_words(self, text: str) -> str:
        return text if self._moses is None else self._moses.tokenize(text)

    def split_pieces(self, text: str) -> list[str]:
        # fairseq reads a line of pieces by splitting it at any whitespace, not only at the spaces between the pieces.
        return " ".join(self.codes.split_line(self.split_words(text))).split()

    def encode(self, text: str) -> list[int]:
        ids = self._ids
        return [ids.get(piece, UNK) for piece in self.split_pieces(text)]

    def decode(self, ids: Iterable[int]) -> str:
        words = post_process(super().decode(ids), "subword_nmt")
        return words if self._moses is None else self._moses.detokenize(words)

    def settings(self) -> dict[str, Any]:
        return {"language": self.language}

    def files(self) -> dict[str, bytes]:
        return {**super().files(), "codes": self.codes_text.encode()}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:
        dictionary = FairseqDictionary.parse(files["dict.txt"], "dict.txt")
        return cls(decode_utf8(files["codes"], "codes"), dictionary, settings["language"])


class _Moses:
    """sacremoses with fairseq's settings: dashes are split and special characters are escaped."""

    def __init__(self, language: str) -> None:
        sacremoses = require("sacremoses", "tokenizer moses-bpe with a language", "text")
        self._tokenizer = sacremoses.MosesTokenizer(language)
        self._detokenizer = sacremoses.MosesDetokenizer(language)

    def tokenize(self, text: str) -> str:
        return self._tokenizer.tokenize(text, aggressive_dash_splits=True, return_str=True, escape=True)

    def detokenize(self, text: str) -> str:
        return self._detokenizer.detokenize(text.split())
