"""What every tokenizer is: a map from text to numbers and back, that can be saved, and recognised by a fingerprint.

A saved tokenizer is a folder: `kind.json` (kind, settings, fingerprint) and the files of its kind beside it.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from subquad.files import CHECKSUM, read_metadata, replace_synced, to_checksummed_json, wrap_corrupt_data_errors

FORMAT = 1
DESCRIPTION = "kind.json"
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(len(SPECIAL_SYMBOLS))


class Tokenizer(ABC):
    """Text to numbers below `size` and back. `bos`, `pad`, `eos` and `unk` are the numbers of the special symbols."""

    kind: ClassVar[str]
    bos, pad, eos, unk = BOS, PAD, EOS, UNK
    size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Numbers of a text, without special symbols around it; what the vocabulary lacks is `unk`."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of numbers. Padding, beginnings and ends are left out; an unknown symbol stays visible."""

    @abstractmethod
    def symbol(self, number: int) -> str:
        """One entry of the vocabulary, for people to read."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Plain data that `restore` needs."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Names and contents of files that `restore` needs."""

    @classmethod
    @abstractmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:
        """The tokenizer that gave `settings()` and `files()`."""

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides about the output."""
        return _fingerprint(self.kind, self.settings(), self.files())

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer into a folder, its description last; `load_tokenizer` reads it.

        A folder that holds it already is left alone, so that nothing can be lost there.
        """
        folder = Path(folder)
        files = self.files()
        description = {
            "format": FORMAT,
            "kind": self.kind,
            "size": self.size,
            "settings": self.settings(),
            "files": sorted(files),
            "fingerprint": self.fingerprint(),
        }
        contents = {**files, DESCRIPTION: to_checksummed_json(description).encode()}
        if all((folder / name).is_file() and (folder / name).read_bytes() == data for name, data in contents.items()):
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION).unlink(missing_ok=True)  # it must not stand beside files of another tokenizer
        for name, data in contents.items():
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_bytes(data)
            replace_synced(temporary, folder / name)

    def _text_ids(self, ids: Iterable[int]) -> list[int]:
        """Numbers without padding, beginnings and ends."""
        hidden = {self.bos, self.pad, self.eos}
        return [number for number in map(int, ids) if number not in hidden]


def load_saved(folder: Path, kinds: Mapping[str, type[Tokenizer]]) -> Tokenizer:
    """The tokenizer of a folder; a damaged one is a ValueError."""
    path = folder / DESCRIPTION
    description = read_metadata(path, FORMAT, "tokenizer", [CHECKSUM])
    with wrap_corrupt_data_errors(f"the tokenizer in {folder}"):
        if description["kind"] not in kinds:
            raise ValueError(f"{path}: unknown kind of tokenizer {description['kind']!r}; a newer subquad may know it")
        if any(Path(name).name != name for name in description["files"]):
            raise ValueError(f"{path} names files outside of its folder")
        try:
            files = {name: (folder / name).read_bytes() for name in description["files"]}
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename} is missing: the tokenizer in {folder} is incomplete") from None
        if _fingerprint(description["kind"], description["settings"], files) != description["fingerprint"]:
            raise ValueError(f"the tokenizer in {folder} is damaged: its fingerprint differs")
        return kinds[description["kind"]].restore(description["settings"], files)


def _fingerprint(kind: str, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256(json.dumps([kind, settings], sort_keys=True).encode())
    for name, content in sorted(files.items()):
        total.update(f"\n{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


def decoded_text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{what}, line {line}: not UTF-8") from None


def file_bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, a file is needed") from None
