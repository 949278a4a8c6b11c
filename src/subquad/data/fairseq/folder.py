"""Reads data folders that fairseq-preprocess wrote. Their dictionaries become tokenizers, their ids the samples.

    translation      dict.de.txt, dict.en.txt, train.de-en.de.{idx,bin}, train.de-en.en.{idx,bin}, valid..., test...
    language model   dict.txt, train.{idx,bin}, valid..., test...

A folder can be used for both directions of its language pair. Text that is not binarised is read as a text file.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from subquad.config import Options
from subquad.data.fairseq.index import INDEX
from subquad.data.text.prepare import TextDataConfig
from subquad.data.tokenizers import build_tokenizer

NAME = re.compile(r"(?P<split>[a-z]+\d*)(\.(?P<first>[^.]+)-(?P<second>[^.]+)\.(?P<language>[^.]+))?\.idx")
"""Matches train.idx and train.de-en.de.idx."""

Pair = tuple[str, str]


class FairseqFolder(Options):
    """A folder that fairseq-preprocess wrote. A string stands for its path."""

    path: str = Field(description="The folder with dict.*.txt, *.idx and *.bin.")
    languages: Pair | None = Field(
        None, description="For translation: source and target. With null the folder's only pair is used as it is named."
    )
    codes: str | None = Field(
        None,
        description="The subword-nmt codes of its text, which join pieces into words. With null pieces stay pieces.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, given: Any) -> Any:
        return {"path": str(given)} if isinstance(given, str | Path) else given

    def text_config(self, sample_kind: str, max_length: int | None = None) -> TextDataConfig:
        """Returns the config that prepares all splits of the folder with its dictionaries."""
        folder = Path(self.path)
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder")
        if sample_kind not in ("pairs", "text"):
            raise ValueError(f"{folder}: data of fairseq holds pairs or text, not samples of the kind {sample_kind}")
        names = _index_names(folder)
        languages, splits = self._pair_files(names) if sample_kind == "pairs" else self._text_files(names)
        if "train1" in splits:
            raise ValueError(
                f"{folder} has its training data in several parts (train, train1, ...), but only one can be read"
            )
        tokenizers = [
            self._tokenizer(folder / (f"dict.{language}.txt" if language else "dict.txt")) for language in languages
        ]
        options = {
            "sample_kind": sample_kind,
            "splits": {split: [str(folder / file) for file in files] for split, files in splits.items()},
            "tokenizer": tokenizers[0],
            "target_tokenizer": tokenizers[1] if len(tokenizers) > 1 else None,
            "max_length": max_length,
        }
        return TextDataConfig.parse(f"{folder}", options)

    def read_vocabularies(self, sample_kind: str) -> list[int]:
        """The sizes of the vocabularies of source and target, or of the text."""
        config = self.text_config(sample_kind)
        return [build_tokenizer(one).size for one in (config.tokenizer, config.target_tokenizer) if one is not None]

    def count_vocabularies(self, sample_kind: str) -> list[int]:
        """The same; none if the folder cannot be read."""
        try:
            return self.read_vocabularies(sample_kind)
        except ValueError:
            return []

    def _tokenizer(self, dictionary: Path) -> dict[str, str]:
        if not dictionary.is_file():
            raise ValueError(f"{dictionary}: there is no such file; fairseq-preprocess writes it beside the data")
        kind = {"kind": "words"} if self.codes is None else {"kind": "moses-bpe", "codes": self.codes}
        return {**kind, "dictionary": str(dictionary)}

    def _text_files(self, names: Iterable[re.Match[str]]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
        """Returns one empty language name, and the file of each split."""
        if self.languages is not None:
            raise ValueError("languages are for translation; the file names of a language model have none")
        splits = {found["split"]: [found.string] for found in names if found["language"] is None}
        if not splits:
            raise ValueError(f"{self.path} holds no data of a language model, such as train{INDEX}")
        return ("",), splits

    def _pair_files(self, names: Iterable[re.Match[str]]) -> tuple[Pair, dict[str, list[str]]]:
        """Returns source and target language, and the two files of each split."""
        pairs: dict[Pair, set[str]] = {}
        for found in names:
            if found["language"] is not None:
                pairs.setdefault((found["first"], found["second"]), set()).add(found["split"])
        if not pairs:
            raise ValueError(f"{self.path} holds no data of two languages, such as train.de-en.de{INDEX}")
        known = ", ".join(f"{first}-{second}" for first, second in pairs)
        if self.languages is None and len(pairs) > 1:
            raise ValueError(f"{self.path} has several pairs of languages ({known}); name source and target")
        source, target = self.languages or next(iter(pairs))
        pair = next((pair for pair in ((source, target), (target, source)) if pair in pairs), None)
        if pair is None:
            raise ValueError(f"{self.path} has no data of {source} and {target}; its pairs are {known}")
        stem = "-".join(pair)
        files = {
            split: [f"{split}.{stem}.{language}{INDEX}" for language in (source, target)]
            for split in sorted(pairs[pair])
        }
        return (source, target), files


def fairseq_sample_kind(folder: Path) -> str | None:
    """Returns the kind of the samples that a folder holds, or None if fairseq-preprocess did not write it."""
    names = _index_names(folder)
    if not names:
        return None
    return "pairs" if any(found["language"] for found in names) else "text"


def _index_names(folder: Path) -> list[re.Match[str]]:
    """Returns the parts of the names of all index files in a folder."""
    return [found for path in sorted(folder.glob(f"*{INDEX}")) if (found := NAME.fullmatch(path.name))]
