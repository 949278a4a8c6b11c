"""Tokenizers: `build_tokenizer(config, lines)` makes one of any kind, and `load_tokenizer(folder)` reads a saved one.

Every file of this folder may define tokenizers: a subclass of `Tokenizer` with a `kind` is found by itself. The lines
that a tokenizer is trained on decide what its vocabulary covers: text of one language, or of both.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from subquad.config import Options, nearest
from subquad.data.tokenizers.base import KINDS, ROLES, Tokenizer, load_tokenizer

__all__ = ["KINDS", "Tokenizer", "TokenizerConfig", "build_tokenizer", "load_tokenizer"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

SAVED = "saved"
SUMMARIES = {
    **{kind: (cls.__doc__ or "").partition("\n")[0] for kind, cls in KINDS.items() if cls.options is not None},
    SAVED: "A folder that `Tokenizer.save` wrote, with a tokenizer of any kind.",
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
            raise ValueError(f"tokenizer {self.kind} does not accept {wrong[0]}; {options}")
        if self.path is None and accepted & {"path"}:
            raise ValueError(f"tokenizer {self.kind} needs the option path")
        for role in (*self.special_tokens, *self.special_ids):
            if role not in ROLES:
                raise ValueError(f"the special tokens are {', '.join(ROLES)}, not {role!r}{nearest(role, ROLES)}")
        if self.kind != SAVED:
            KINDS[self.kind].check_config(self)

    def _accepted(self) -> frozenset[str]:
        return frozenset({"path"}) if self.kind == SAVED else KINDS[self.kind].options or frozenset()

    def _defaults(self) -> set[str]:
        """Returns the options that were given with their default values, as a config written out in full gives them."""
        fields = type(self).model_fields
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in self.model_fields_set}
        return {name for name, default in defaults.items() if getattr(self, name) == default}

    @property
    def needs_text(self) -> bool:
        """Whether the tokenizer is trained on text, rather than loaded from files."""
        return self.kind != SAVED and KINDS[self.kind].needs_text(self)

    def paths(self) -> list[Path]:
        """Returns the files that the tokenizer is made from."""
        found = [Path(path) for path in (self.path, self.codes, self.dictionary) if path is not None]
        return [inner for path in found for inner in (sorted(path.iterdir()) if path.is_dir() else [path])]


def build_tokenizer(config: TokenizerConfig, lines: Iterable[str] = ()) -> Tokenizer:
    """Returns the tokenizer that `config` describes. Kinds that are loaded from files do not read `lines`."""
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
