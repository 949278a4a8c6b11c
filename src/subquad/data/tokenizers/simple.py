"""Tokenizers without subwords: bytes, characters, token ids that exist already, and labels of classes."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from subquad.config import nearest
from subquad.data.tokenizers import NUM_SPECIAL, SPECIAL_TOKENS, UNK, Tokenizer

if TYPE_CHECKING:
    from subquad.data.tokenizers import TokenizerConfig


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text; nothing is trained, and no text is unknown.

    The id of a byte is its value plus four.
    """

    kind = "bytes"
    size = NUM_SPECIAL + 256

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:  # noqa: ARG003
        return cls()

    def encode(self, text: str) -> list[int]:
        return [NUM_SPECIAL + byte for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = (b"<unk>" if number == UNK else bytes([number - NUM_SPECIAL]) for number in self._without_special(ids))
        return b"".join(pieces).decode(errors="replace")

    def id_to_token(self, number: int) -> str:
        if number < NUM_SPECIAL:
            return SPECIAL_TOKENS[number]
        byte = number - NUM_SPECIAL
        return chr(byte) if 0x20 < byte < 0x7F else f"0x{byte:02x}"

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls()


class CharacterTokenizer(Tokenizer):
    """Unicode characters, the most frequent first; an unknown one is decoded as U+FFFD."""

    kind = "characters"
    options = frozenset({"vocab_size", "min_count"})

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = list(characters)
        self._ids = {character: NUM_SPECIAL + i for i, character in enumerate(self.characters)}
        self.size = NUM_SPECIAL + len(self.characters)

    @classmethod
    def needs_text(cls, config: "TokenizerConfig") -> bool:  # noqa: ARG003
        return True

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line)
        frequent = [character for character, count in counts.items() if count >= config.min_count]
        frequent.sort(key=lambda character: (-counts[character], character))
        return cls(frequent if config.vocab_size is None else frequent[: max(0, config.vocab_size - NUM_SPECIAL)])

    def encode(self, text: str) -> list[int]:
        ids = self._ids
        return [ids.get(character, UNK) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        shown = self._without_special(ids)
        return "".join("\ufffd" if number == UNK else self.characters[number - NUM_SPECIAL] for number in shown)

    def id_to_token(self, number: int) -> str:
        return SPECIAL_TOKENS[number] if number < NUM_SPECIAL else repr(self.characters[number - NUM_SPECIAL])[1:-1]

    def files(self) -> dict[str, bytes]:
        return {"characters.json": json.dumps(self.characters).encode()}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(json.loads(files["characters.json"]))


class IdTokenizer(Tokenizer):
    """Token ids of data that was tokenised elsewhere; a text is a line of such numbers."""

    kind = "ids"
    options = frozenset({"vocab_size", "special_ids"})

    def __init__(self, size: int, special_ids: Mapping[str, int]) -> None:
        """special_ids: the ids of `pad` and `eos`, and of `bos` and `unk` where the data has them."""
        self.size, self.special_ids = size, dict(special_ids)
        self.bos, self.pad = special_ids.get("bos", -1), special_ids["pad"]
        self.eos, self.unk = special_ids["eos"], special_ids.get("unk", -1)

    @classmethod
    def check_config(cls, config: "TokenizerConfig") -> None:
        size, special = config.vocab_size, config.special_ids
        if size is None or not {"pad", "eos"} <= special.keys():
            raise ValueError("tokenizer ids needs vocab_size and special_ids, such as special_ids: {pad: 1, eos: 2}")
        for role, number in special.items():
            if not 0 <= number < size:
                raise ValueError(f"special_ids.{role} is {number}, but a vocabulary of {size} has 0 to {size - 1}")
        if special["pad"] == special["eos"]:
            raise ValueError("special_ids.pad and special_ids.eos must differ, because padding is never learned")

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> Self:  # noqa: ARG003
        return cls(int(config.vocab_size or 0), config.special_ids)

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def _id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit() and int(word) < self.size):
            raise ValueError(f"{word!r} is no token id; the vocabulary has 0 to {self.size - 1}")
        return int(word)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, self._without_special(ids)))

    def id_to_token(self, number: int) -> str:
        return str(number)

    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "special_ids": self.special_ids}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(settings["size"], settings["special_ids"])


class LabelTokenizer(Tokenizer):
    """Names of classes, numbered from 0. There are no special tokens, and an unknown name is an error."""

    kind = "labels"
    options = None
    bos = pad = eos = unk = -1

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._ids = {name: number for number, name in enumerate(self.names)}
        self.size = len(self.names)

    @classmethod
    def train(cls, labels: Iterable[str]) -> Self:
        """Returns a tokenizer of all labels, in alphabetical order, or by value if all of them are whole numbers."""
        names = {label.strip() for label in labels}
        numeric = all(name.isascii() and name.removeprefix("-").isdigit() for name in names)
        return cls(sorted(names, key=lambda name: (int(name) if numeric else 0, name)))

    def encode(self, text: str) -> list[int]:
        name = text.strip()
        if name not in self._ids:
            hint = nearest(name, self.names)
            raise ValueError(f"no class is called {name!r}{hint} The training data has {self.size} classes.")
        return [self._ids[name]]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.names[int(number)] for number in ids)

    def id_to_token(self, number: int) -> str:
        return self.names[number]

    def settings(self) -> dict[str, Any]:
        return {"names": self.names}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:  # noqa: ARG003
        return cls(settings["names"])
