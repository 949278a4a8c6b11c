"""Text as fairseq's published models read it: its dictionary, subword-nmt codes, and how pieces become words again."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from subquad.data.tokenizers.base import EOS, SPECIAL_SYMBOLS, UNK, decoded_text, file_bytes

OVERWRITE = "#fairseq:overwrite"
END = "</w>"
JOINER = "@@"


class FairseqDictionary:
    """Symbols with their counts. The first four are <s>, <pad>, </s>, <unk>, each counted once from the start."""

    def __init__(self) -> None:
        self.symbols: list[str] = []
        self.counts: list[int] = []
        self.numbers: dict[str, int] = {}
        for symbol in SPECIAL_SYMBOLS:
            self.add(symbol)

    def __len__(self) -> int:
        return len(self.symbols)

    def add(self, symbol: str, count: int = 1, overwrite: bool = False) -> int:
        """Counts a symbol, and gives it a number when it is new (or when it takes another one's place)."""
        if symbol in self.numbers and not overwrite:
            self.counts[self.numbers[symbol]] += count
        else:
            self.numbers[symbol] = len(self.symbols)
            self.symbols.append(symbol)
            self.counts.append(count)
        return self.numbers[symbol]

    def index(self, symbol: str) -> int:
        """The number of a symbol, or that of <unk>."""
        return self.numbers.get(symbol, UNK)

    def word_numbers(self) -> dict[str, int]:
        """Numbers of what a text may contain: a text that spells <pad> or </s> must not end its own sentence."""
        controls = set(range(UNK))
        return {symbol: number for symbol, number in self.numbers.items() if number not in controls}

    def finalize(self, threshold: int = -1, nwords: int = -1, padding_factor: int = 8) -> None:
        """Sorts by count, the most frequent first, equals by their spelling; drops what is counted less than
        `threshold` and what makes the dictionary larger than `nwords` (special symbols included; <= 0: no limit);
        then fills up with madeupword0000, ... to a multiple of `padding_factor`."""
        special = len(SPECIAL_SYMBOLS)
        words = sorted(zip(self.symbols[special:], self.counts[special:], strict=True))
        words.sort(key=lambda word: -word[1])
        if nwords > 0:
            words = words[: max(0, nwords - special)]
        kept = [word for word in words if word[1] >= threshold]
        kept = [*zip(self.symbols[:special], self.counts[:special], strict=True), *kept]
        self.symbols = [symbol for symbol, _ in kept]
        self.counts = [count for _, count in kept]
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        made_up = 0
        while padding_factor > 1 and len(self) % padding_factor:
            self.add(f"madeupword{made_up:04d}", 0)
            made_up += 1

    @classmethod
    def of_words(cls, words: Counter[str], threshold: int, nwords: int, padding_factor: int) -> Self:
        dictionary = cls()
        for word, count in words.items():
            dictionary.add(word, count)
        dictionary.finalize(threshold, nwords, padding_factor)
        return dictionary

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A dict.txt: one symbol and its count in a line."""
        return cls.parse(file_bytes(path), str(path))

    @classmethod
    def parse(cls, data: bytes, what: str) -> Self:
        dictionary = cls()
        lines = decoded_text(data, what).removesuffix("\n").split("\n")
        for number, line in enumerate(lines if data else [], 1):
            word, _, field = line.rstrip().rpartition(" ")
            overwrite = field == OVERWRITE
            if overwrite:
                word, _, field = word.rpartition(" ")
            if not word or not re.fullmatch(r"-?\d+", field):
                raise ValueError(f"{what}, line {number}: 'symbol count' is needed, got {line!r}")
            if word in dictionary.numbers and not overwrite:
                raise ValueError(f"{what}, line {number}: {word!r} stands there twice; {OVERWRITE} would allow it")
            dictionary.add(word, int(field), overwrite)
        return dictionary

    def text(self) -> str:
        """The content of a dict.txt."""
        first = len(SPECIAL_SYMBOLS)
        words = zip(self.symbols[first:], self.counts[first:], strict=True)
        # Of two that are spelled alike the later one is right, which the file has to say.
        seen: set[str] = set(SPECIAL_SYMBOLS)
        lines = []
        for symbol, count in words:
            lines.append(f"{symbol} {count} {OVERWRITE}\n" if symbol in seen else f"{symbol} {count}\n")
            seen.add(symbol)
        return "".join(lines)

    def encode_line(self, line: str, append_eos: bool = True, reverse: bool = False) -> list[int]:
        """Numbers of the words of a line, which whitespace separates."""
        words = line.split()
        ids = [self.index(word) for word in (reversed(words) if reverse else words)]
        return [*ids, EOS] if append_eos else ids

    def string(self, ids: Iterable[int], kind: str | None = None) -> str:
        """The line of numbers, without beginnings and ends; `kind` says how pieces become words (`post_process`)."""
        hidden = {0, EOS}
        return post_process(" ".join(self.symbols[number] for number in ids if number not in hidden), kind)


def _marked_words(mark: str) -> Callable[[str], str]:
    """For pieces where a mark stands for the space between words."""
    return lambda text: text.replace(" ", "").replace(mark, " ").strip()


def _joined_words(joiner: str) -> Callable[[str], str]:
    """For pieces where a joiner says that the word goes on."""
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


def post_process(symbols: str, kind: str | None) -> str:
    """Words of a line of pieces, as fairseq's --post-process (--remove-bpe) makes them."""
    if kind is None:
        return symbols
    if kind not in POST_PROCESS:
        raise ValueError(f"pieces cannot be joined by {kind!r}; known: {', '.join(map(repr, POST_PROCESS))}")
    return POST_PROCESS[kind](symbols)


class SubwordCodes:
    """Merges that subword-nmt learned, applied to words as it applies them: the earliest learned merge first.

    Version 0.1 of the file has the end of a word as a symbol of its own, version 0.2 as a part of the last character.
    """

    def __init__(self, text: str, what: str) -> None:
        lines = text.removesuffix("\n").split("\n")
        header = re.match(r"#version: (\d+)\.(\d+)", lines[0])
        self.end_apart = header is None or (int(header[1]), int(header[2])) < (0, 2)
        self.ranks: dict[tuple[str, str], int] = {}
        for number, line in enumerate(lines):
            if (number == 0 and header is not None) or not line.strip():
                continue
            pair = tuple(line.strip("\r ").split(" "))
            if len(pair) != 2:
                raise ValueError(f"{what}, line {number + 1}: a merge is two symbols, got {line!r}")
            self.ranks.setdefault(pair, number)
        if not self.ranks:
            raise ValueError(f"{what} holds no merges")
        self._cache: dict[str, list[str]] = {}

    def pieces(self, line: str) -> list[str]:
        """The pieces of a line of words; all but the last of a word end with @@. Only spaces stand between words."""
        pieces: list[str] = []
        for word in filter(None, line.strip("\r\n ").split(" ")):
            if word not in self._cache:
                if len(self._cache) > 200_000:
                    self._cache.clear()  # names and numbers never end; memory does
                parts = self._split(word)
                self._cache[word] = [*(part + JOINER for part in parts[:-1]), parts[-1]]
            pieces += self._cache[word]
        return pieces

    def _split(self, word: str) -> list[str]:
        if len(word) == 1:
            return [word]
        parts = [*word, END] if self.end_apart else [*word[:-1], word[-1] + END]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, math.inf))
            if best not in self.ranks:
                break
            parts = _merged(parts, best)
        if parts[-1] == END:
            return parts[:-1]
        return [*parts[:-1], parts[-1].removesuffix(END)]


def _merged(parts: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Every occurrence of the pair as one part, from left to right."""
    merged: list[str] = []
    position = 0
    while position < len(parts):
        if tuple(parts[position : position + 2]) == pair:
            merged.append("".join(pair))
            position += 2
        else:
            merged.append(parts[position])
            position += 1
    return merged
