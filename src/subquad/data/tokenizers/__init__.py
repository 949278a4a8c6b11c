"""Tokenizers: `build_tokenizer(config, lines)` makes one of any kind, and `load_tokenizer(folder)` reads a saved one.

Every file of this folder may define tokenizers: a subclass of `Tokenizer` with a `kind` is found by itself. The lines
that a tokenizer is trained on decide what its vocabulary covers: text of one language, or of both. A saved tokenizer is
a folder with `kind.json` (kind, settings and fingerprint) and the files of that kind beside it.
"""

import hashlib
import importlib
import itertools
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from subquad.config import Options, nearest
from subquad.files import CHECKSUM, read_metadata, to_checksummed_json, wrap_corrupt_data_errors, write_files

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
        write_files({folder / name: partial(Path.write_bytes, data=data) for name, data in contents.items()})

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


def check_same_tokens(own: Tokenizer, other: Tokenizer, where: str) -> None:
    """Raises a ValueError if a number stands for different tokens in two tokenizers. where: what has the other one."""
    if own.fingerprint() == other.fingerprint():
        return
    if own.size != other.size:
        raise ValueError(f"{where} has {other.size:,} tokens, but the model was trained with {own.size:,}")
    for number in range(own.size):
        if (ours := own.id_to_token(number)) != (theirs := other.id_to_token(number)):
            raise ValueError(f"{where} has {theirs!r} as token {number}, but the model was trained with {ours!r}")


# ---------------------------------------------------------------------- every kind, by its config

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

SAVED, RUN = "saved", "run"
SUMMARIES = {
    **{kind: (cls.__doc__ or "").partition("\n")[0] for kind, cls in KINDS.items() if cls.options is not None},
    SAVED: "A folder that `Tokenizer.save` wrote, with a tokenizer of any kind.",
    RUN: "The tokenizers that the run directory has already, from an import or from the run that it began with.",
}
"""What a config can ask for, with a sentence about each kind."""
__doc__ += "\n" + "\n".join(f"    {kind:<15} {summary}" for kind, summary in SUMMARIES.items()) + "\n"

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(SUMMARIES)]


class TokenizerConfig(Options):
    """Which tokenizer to use, and its options. Each kind accepts only some of the options."""

    kind: Kind = Field("bpe", description="The kind of tokenizer.")
    vocab_size: int | None = Field(
        None,
        ge=5,
        description="The largest size of the vocabulary, special tokens included. By default it is 8000 for bpe and "
        "unigram, and unlimited for words and characters.",
    )
    min_count: int = Field(1, ge=1, description="Words and characters that occur less often are treated as unknown.")
    multiple: int = Field(
        1, ge=1, description="The vocabulary is filled up to a multiple of this number; fairseq uses 8."
    )
    path: str | None = Field(None, description="The tokenizer.json, SentencePiece model or saved tokenizer to load.")
    special_tokens: dict[str, str] = Field(
        default_factory=dict,
        description="How a tokenizer.json spells bos, pad, eos and unk. By default the usual spellings are tried.",
    )
    special_ids: dict[str, int] = Field(
        default_factory=dict,
        description="For kind ids: the ids of pad and eos, and of bos and unk where the data has them.",
    )
    codes: str | None = Field(None, description="The file of subword-nmt codes.")
    dictionary: str | None = Field(None, description="A dict.txt of fairseq. By default it is made from the text.")
    language: str | None = Field(
        None, description="The language for Moses tokenisation. With null the text must be tokenised already."
    )

    def check(self) -> None:
        accepted = self._accepted()
        if wrong := sorted(self.model_fields_set - accepted - {"kind"} - self._defaults()):
            options = f"it accepts {', '.join(sorted(accepted))}" if accepted else "it has no options"
            whole = f"data.tokenizer:={{kind: {self.kind}}} on a command line replaces all of another kind's"
            raise ValueError(f"tokenizer {self.kind} does not accept {wrong[0]}; {options}; {whole}")
        if self.path is None and accepted & {"path"}:
            raise ValueError(f"tokenizer {self.kind} needs the option path")
        for role in (*self.special_tokens, *self.special_ids):
            if role not in ROLES:
                raise ValueError(f"the special tokens are {', '.join(ROLES)}, not {role!r}{nearest(role, ROLES)}")
        if self.kind not in (SAVED, RUN):
            KINDS[self.kind].check_config(self)

    def _accepted(self) -> frozenset[str]:
        own = {SAVED: frozenset({"path"}), RUN: frozenset[str]()}
        return own[self.kind] if self.kind in own else KINDS[self.kind].options or frozenset()

    def _defaults(self) -> set[str]:
        """Returns the options that were given with their default values, as a config written out in full gives them."""
        fields = type(self).model_fields
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in self.model_fields_set}
        return {name for name, default in defaults.items() if getattr(self, name) == default}

    @property
    def needs_text(self) -> bool:
        """Whether the tokenizer is trained on text, rather than loaded from files."""
        return self.kind not in (SAVED, RUN) and KINDS[self.kind].needs_text(self)

    def paths(self) -> list[Path]:
        """Returns the files that the tokenizer is made from."""
        found = [Path(path) for path in (self.path, self.codes, self.dictionary) if path is not None]
        return [inner for path in found for inner in (sorted(path.iterdir()) if path.is_dir() else [path])]


def build_tokenizer(config: TokenizerConfig, lines: Iterable[str] = ()) -> Tokenizer:
    """Returns the tokenizer that `config` describes. Kinds that are loaded from files do not read `lines`."""
    if config.kind == RUN:
        raise ValueError("only a run directory has tokenizers for kind run; give kind saved, and path")
    if config.kind == SAVED:
        return load_tokenizer(str(config.path))
    if not config.needs_text:
        return KINDS[config.kind].build(config, ())
    iterator = iter(lines)
    beginning = []
    for line in iterator:
        beginning.append(line)
        if line.strip():
            return KINDS[config.kind].build(config, itertools.chain(beginning, iterator))
    raise ValueError(f"tokenizer {config.kind} needs text to train on, but there was none")
