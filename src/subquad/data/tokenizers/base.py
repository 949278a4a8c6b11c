"""The base class of all tokenizers, and the folder that a tokenizer is saved in.

A saved tokenizer is a folder with `kind.json` (kind, settings and fingerprint) and the files of that kind beside it.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from subquad.files import CHECKSUM, read_metadata, replace_synced, to_checksummed_json, wrap_corrupt_data_errors

if TYPE_CHECKING:
    from subquad.data.tokenizers import TokenizerConfig

FORMAT = 1
DESCRIPTION = "kind.json"
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
NUM_SPECIAL = len(SPECIAL_TOKENS)
BOS, PAD, EOS, UNK = range(NUM_SPECIAL)
ROLES = ("bos", "pad", "eos", "unk")
"""What the special tokens are for, in the order of `SPECIAL_TOKENS`."""

KINDS: dict[str, type["Tokenizer"]] = {}
"""Every tokenizer class by its kind. A class that sets `kind` enters itself here when it is defined."""


class Tokenizer(ABC):
    """A map from text to token ids below `size`, and back. `bos`, `pad`, `eos` and `unk` are ids of special tokens.

    To add a tokenizer, write a subclass with a `kind` in a file of this folder. The first line of its docstring becomes
    its description in the documentation. An id of -1 says that the tokenizer has no such special token.
    """

    kind: ClassVar[str]
    options: ClassVar[frozenset[str] | None] = frozenset()
    """Names of the options of `TokenizerConfig` that this kind accepts. None: a config cannot ask for this kind."""
    bos, pad, eos, unk = BOS, PAD, EOS, UNK
    size: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    @classmethod  # noqa: B027 - most kinds have nothing to check
    def check_config(cls, config: "TokenizerConfig") -> None:
        """Raises a ValueError if the options in `config` do not fit this kind; names were checked before."""

    @classmethod
    def needs_text(cls, config: "TokenizerConfig") -> bool:  # noqa: ARG003
        """Returns whether `build` trains on lines of text. By default it does not."""
        return False

    @classmethod
    def build(cls, config: "TokenizerConfig", lines: Iterable[str]) -> "Tokenizer":
        """Returns the tokenizer that `config` describes, trained on `lines` if `needs_text(config)`."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens around them. Unknown tokens become `unk`."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids. It leaves out `bos`, `pad` and `eos`, and shows unknown tokens."""

    @abstractmethod
    def id_to_token(self, number: int) -> str:
        """Returns one entry of the vocabulary in a form that people can read."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def settings(self) -> dict[str, Any]:
        """Returns the JSON-compatible values that `restore` needs."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Returns names and contents of the files that `restore` needs."""
        return {}

    @classmethod
    @abstractmethod
    def restore(cls, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> Self:
        """Returns the tokenizer whose `settings()` and `files()` are given."""

    def fingerprint(self) -> str:
        """Returns the SHA-256 of everything that the output depends on."""
        return _fingerprint(self.kind, self.settings(), self.files())

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer into a folder that `load_tokenizer` can read. The description is written last.

        A folder that already holds this tokenizer is not touched, so an interruption cannot damage it.
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
        (folder / DESCRIPTION).unlink(missing_ok=True)  # it must not stand beside the files of another tokenizer
        for name, data in contents.items():
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_bytes(data)
            replace_synced(temporary, folder / name)

    def _without_special(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that are neither `bos` nor `pad` nor `eos`."""
        special = {self.bos, self.pad, self.eos}
        return [number for number in map(int, ids) if number not in special]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Returns the tokenizer that was saved in a folder. A damaged folder raises a ValueError."""
    folder = Path(folder)
    path = folder / DESCRIPTION
    description = read_metadata(path, FORMAT, "tokenizer", [CHECKSUM])
    with wrap_corrupt_data_errors(f"the tokenizer in {folder}"):
        if any(Path(name).name != name for name in description["files"]):
            raise ValueError(f"{path} names files outside of its folder.")
        try:
            files = {name: (folder / name).read_bytes() for name in description["files"]}
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename} is missing: the tokenizer in {folder} is incomplete.") from None
        return restore_tokenizer(description, files, str(path))


def restore_tokenizer(description: Mapping[str, Any], files: Mapping[str, bytes], path: str) -> Tokenizer:
    """Returns the tokenizer of a description (kind, settings and fingerprint) and the contents of its files.

    path: the file that the description was read from, which error messages name.
    """
    kind = description.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{path}: the kind of tokenizer {kind!r} is unknown. A newer version of subquad may know it.")
    if _fingerprint(kind, description["settings"], files) != description["fingerprint"]:
        raise ValueError(f"The tokenizer in {path} is damaged: its fingerprint differs.")
    return KINDS[kind].restore(description["settings"], files)


def _fingerprint(kind: str, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256(json.dumps([kind, settings], sort_keys=True).encode())
    for name, content in sorted(files.items()):
        total.update(f"\n{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()
