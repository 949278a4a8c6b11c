"""A folder of prepared text, opened: its splits, sides, stores and tokenizers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.config import nearest
from subquad.data.text.store import TokenStore
from subquad.data.tokenizers import Tokenizer, load_tokenizer
from subquad.files import CHECKSUM, read_metadata

FORMAT = 1
DESCRIPTION = "data.json"
ENTRIES = ("task", "sides", "splits", "tokenizers", CHECKSUM)
SIDES: dict[str, tuple[str, ...]] = {
    "translation": ("source", "target"),
    "language-model": ("text",),
    "classification": ("label", "text"),
}


def prepared_for(task: str) -> str:
    """The task that text is prepared for: masked language models read what language models do."""
    return "language-model" if task == "masked-language-model" else task


@dataclass(frozen=True)
class Prepared:
    """A prepared folder. changes: what the call that returned it did, by tokenizer and split."""

    folder: Path
    description: Mapping[str, Any]
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return self.description["task"]

    @property
    def sides(self) -> tuple[str, ...]:
        return SIDES[self.task]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.description["splits"])

    def skipped(self) -> dict[str, str]:
        """How many samples of a split were skipped and why, in words; splits without such are left out."""
        found = {}
        for name, split in self.description["splits"].items():
            if reasons := [f"{count:,} {reason}" for reason, count in split["skipped"].items() if count]:
                found[name] = ", ".join(reasons)
        return found

    def store(self, split: str, side: str) -> TokenStore:
        for what, name, known in (("split", split, self.splits), ("side", side, self.sides)):
            if name not in known:
                hint = f"{nearest(name, known)} It has {', '.join(known)}"
                raise ValueError(f"{self.folder} has no {what} {name!r}{hint}")
        store = TokenStore.open(self.folder / f"{split}.{side}")
        if store.meta["tokenizer"] != self._fingerprint(side):
            raise ValueError(f"{store.path} was made with another tokenizer; prepare the data again")
        return store

    def verify(self) -> None:
        """Reads everything and compares checksums; a difference is a ValueError that names the file."""
        for split in self.splits:
            for side in self.sides:
                self.store(split, side).verify()

    def tokenizer(self, side: str) -> Tokenizer:
        tokenizer = load_tokenizer(self.folder / self.description["sides"][side])
        if tokenizer.fingerprint() != self._fingerprint(side):
            raise ValueError(f"the tokenizer in {self.folder} is not the one of the data; prepare the data again")
        return tokenizer

    def _fingerprint(self, side: str) -> str:
        return self.description["tokenizers"][self.description["sides"][side]]["fingerprint"]


def open_prepared(folder: str | Path) -> Prepared:
    """The data that `prepare_text` wrote."""
    folder = Path(folder)
    description = read_metadata(folder / DESCRIPTION, FORMAT, "prepared data", ENTRIES)
    return Prepared(folder, description)
