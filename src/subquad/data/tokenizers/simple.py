"""Tokenizers that need no search: bytes, characters, words, words in pieces as fairseq has them, numbers, labels."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from subquad.config import nearest
from subquad.data.tokenizers.base import SPECIAL_SYMBOLS, UNK, Tokenizer, decoded_text
from subquad.data.tokenizers.fairseq import FairseqDictionary, SubwordCodes, post_process
from subquad.packages import require

FIRST = len(SPECIAL_SYMBOLS)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, each four above its value. Every text has its numbers, and they give it back."""

    kind = "bytes"
    size = FIRST + 256

    def encode(self, text: str) -> list[int]:
        return [FIRST + byte for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = (b"<unk>" if number == UNK else bytes([number - FIRST]) for number in self._text_ids(ids))
        return b"".join(pieces).decode(errors="replace")

    def symbol(self, number: int) -> str:
        if number < FIRST:
            return SPECIAL_SYMBOLS[number]
        byte = number - FIRST
        return chr(byte) if 0x20 < byte < 0x7F else f"0x{byte:02x}"

    def settings(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, bytes]:
        return {}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls()


class CharacterTokenizer(Tokenizer):
    """Unicode characters, the most frequent first. An unknown one is decoded as U+FFFD."""

    kind = "characters"

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = list(characters)
        self._numbers = {character: FIRST + i for i, character in enumerate(self.characters)}
        self.size = FIRST + len(self.characters)

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int | None, min_count: int) -> Self:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line)
        kept = sorted((c for c, count in counts.items() if count >= min_count), key=lambda c: (-counts[c], c))
        return cls(kept if vocab_size is None else kept[: max(0, vocab_size - FIRST)])

    def encode(self, text: str) -> list[int]:
        numbers = self._numbers
        return [numbers.get(character, UNK) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join("\ufffd" if n == UNK else self.characters[n - FIRST] for n in self._text_ids(ids))

    def symbol(self, number: int) -> str:
        return SPECIAL_SYMBOLS[number] if number < FIRST else repr(self.characters[number - FIRST])[1:-1]

    def settings(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, bytes]:
        return {"characters.json": json.dumps(self.characters).encode()}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(json.loads(files["characters.json"]))


class WordTokenizer(Tokenizer):
    """Words between whitespace, the most frequent first, as WikiText is read. <unk> in a text is the unknown word."""

    kind = "words"

    def __init__(self, dictionary: FairseqDictionary) -> None:
        self.dictionary = dictionary
        self.size = len(dictionary)
        self._numbers = dictionary.word_numbers()

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int | None, min_count: int, multiple: int) -> Self:
        words: Counter[str] = Counter()
        for line in lines:
            words.update(line.split())
        return cls(FairseqDictionary.of_words(words, min_count, vocab_size or -1, multiple))

    def words(self, text: str) -> str:
        """The text with spaces between its words, as it is before words become numbers."""
        return text

    def encode(self, text: str) -> list[int]:
        numbers = self._numbers
        return [numbers.get(word, UNK) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.symbol(number) for number in self._text_ids(ids))

    def symbol(self, number: int) -> str:
        return self.dictionary.symbols[number]

    def settings(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, bytes]:
        return {"dict.txt": self.dictionary.text().encode()}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(FairseqDictionary.parse(files["dict.txt"], "dict.txt"))


class MosesTokenizer(WordTokenizer):
    """Moses tokenisation, subword-nmt codes, fairseq's dictionary: how the published LightConv models read text.

    Without a language the text is taken as tokenised already, and stays so.
    """

    kind = "moses-bpe"

    def __init__(self, codes: str, dictionary: FairseqDictionary, language: str | None) -> None:
        super().__init__(dictionary)
        self.codes_text, self.language = codes, language
        self.codes = SubwordCodes(codes, "the subword-nmt codes")
        self._moses = _Moses(language) if language is not None else None

    @classmethod
    def train_dictionary(
        cls,
        codes: str,
        language: str | None,
        lines: Iterable[str],
        vocab_size: int | None,
        min_count: int,
        multiple: int,
    ) -> Self:
        """With a dictionary of the pieces of these lines, as fairseq-preprocess makes one."""
        bare = cls(codes, FairseqDictionary(), language)
        pieces: Counter[str] = Counter()
        for line in lines:
            pieces.update(bare.pieces(line))
        return cls(codes, FairseqDictionary.of_words(pieces, min_count, vocab_size or -1, multiple), language)

    def words(self, text: str) -> str:
        return text if self._moses is None else self._moses.tokenize(text)

    def pieces(self, text: str) -> list[str]:
        # A line of pieces is read as fairseq reads it: at any whitespace, not only at what the codes take for it.
        return " ".join(self.codes.pieces(self.words(text))).split()

    def encode(self, text: str) -> list[int]:
        numbers = self._numbers
        return [numbers.get(piece, UNK) for piece in self.pieces(text)]

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
        return cls(decoded_text(files["codes"], "codes"), dictionary, settings["language"])


class _Moses:
    """sacremoses with fairseq's settings: dashes split, special characters escaped."""

    def __init__(self, language: str) -> None:
        sacremoses = require("sacremoses", "tokenizer moses-bpe with a language", "text")
        self._tokenizer = sacremoses.MosesTokenizer(language)
        self._detokenizer = sacremoses.MosesDetokenizer(language)

    def tokenize(self, text: str) -> str:
        return self._tokenizer.tokenize(text, aggressive_dash_splits=True, return_str=True, escape=True)

    def detokenize(self, text: str) -> str:
        return self._detokenizer.detokenize(text.split())


class IdsTokenizer(Tokenizer):
    """Numbers as they are: a text is a line of them. What they stand for is known elsewhere."""

    kind = "ids"

    def __init__(self, size: int, numbers: Mapping[str, int]) -> None:
        """numbers: of `pad` and `eos`, and of `bos` and `unk` where there are such."""
        self.size, self.numbers = size, dict(numbers)
        self.bos, self.pad = numbers.get("bos", -1), numbers["pad"]
        self.eos, self.unk = numbers["eos"], numbers.get("unk", -1)

    def encode(self, text: str) -> list[int]:
        return [self._number(word) for word in text.split()]

    def _number(self, word: str) -> int:
        if not (word.isascii() and word.isdigit() and int(word) < self.size):
            raise ValueError(f"{word!r} is no number of the vocabulary, which are 0 to {self.size - 1}")
        return int(word)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, self._text_ids(ids)))

    def symbol(self, number: int) -> str:
        return str(number)

    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "numbers": self.numbers}

    def files(self) -> dict[str, bytes]:
        return {}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(settings["size"], settings["numbers"])


class LabelTokenizer(Tokenizer):
    """Names of classes, each one number from 0. There are no special symbols, and an unknown name is an error."""

    kind = "labels"
    bos = pad = eos = unk = -1

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.size = len(self.names)

    @classmethod
    def train(cls, labels: Iterable[str]) -> Self:
        """All labels, sorted; as numbers when all are whole numbers."""
        names = {label.strip() for label in labels}
        numeric = all(name.isascii() and name.removeprefix("-").isdigit() for name in names)
        return cls(sorted(names, key=lambda name: (int(name) if numeric else 0, name)))

    def encode(self, text: str) -> list[int]:
        name = text.strip()
        if name not in self._numbers:
            raise ValueError(f"no class is called {name!r}{nearest(name, self.names)} Training has {self.size} classes")
        return [self._numbers[name]]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.names[int(number)] for number in ids)

    def symbol(self, number: int) -> str:
        return self.names[number]

    def settings(self) -> dict[str, Any]:
        return {"names": self.names}

    def files(self) -> dict[str, bytes]:
        return {}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(settings["names"])
