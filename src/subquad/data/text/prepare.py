"""Text files into a folder of memory-mapped tokens, once: a second call redoes only what changed.

    data.json                      inputs, tokenizers, options, counts, and what was skipped and why
    tokenizer/                     or tokenizer.source/ and tokenizer.target/; labels/ for classes
    train.source.tokens, ...       a token store for each split and side

A split is redone when the content of its input, its tokenizers or the options differ from what data.json says.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from subquad.config import Options
from subquad.data.text.arrays import array_chunks
from subquad.data.text.encode import EMPTY, OVER_LONG, Encoded, Rules, encoded_chunks
from subquad.data.text.fingerprints import file_record, reading, source_records
from subquad.data.text.prepared import DESCRIPTION, FORMAT, SIDES, Prepared, open_prepared
from subquad.data.text.sources import Position, TextSource, read_samples
from subquad.data.text.store import TokenStore, TokenWriter, dtype_for, remove_store
from subquad.data.tokenizers import Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer
from subquad.data.tokenizers.simple import LabelTokenizer
from subquad.files import digest, write_metadata

Task = Literal["translation", "language-model", "classification"]
SMALL = 16 << 20  # bytes of input below which starting processes costs more than it saves
REUSED = "reused"


class TextDataConfig(Options):
    """What to prepare: files for each split, tokenizers, and which samples are skipped."""

    task: Task = Field("translation", description="what a sample is: source and target, text, or label and text")
    splits: dict[str, TextSource] = Field(min_length=1, description="files by split; tokenizers are trained on `train`")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="of all text, both sides of it")
    target_tokenizer: TokenizerConfig | None = Field(
        None, description="in translation: one of its own for the target; null: both sides share one, trained on both"
    )
    max_length: int | None = Field(None, ge=1, description="samples with more tokens on a side are skipped and counted")
    keep_empty: bool | None = Field(
        None, description="keep samples with an empty side; default: only in language modelling"
    )

    @field_validator("splits")
    @classmethod
    def _named(cls, splits: dict[str, TextSource]) -> dict[str, TextSource]:
        for name in splits:
            if not name or not all(letter.isalnum() or letter in "_-" for letter in name):
                raise ValueError(f"a split is named by letters, digits, _ and -, not {name!r}")
        return splits

    def check(self) -> None:
        if self.target_tokenizer is not None and self.task != "translation":
            raise ValueError(f"target_tokenizer is for translation; {self.task} has one tokenizer")
        for config in (self.tokenizer, self.target_tokenizer):
            if config is not None and config.reads_lines and "train" not in self.splits:
                raise ValueError(f"tokenizer {config.kind} is trained on the split `train`, which is missing")
            if config is not None and config.reads_lines and self.splits["train"].is_ids:
                raise ValueError(
                    f"tokenizer {config.kind} is trained on text, but `train` holds numbers of tokens: give the "
                    "tokenizer that made them (kind file, sentencepiece, saved, ...), or kind ids and vocab_size"
                )
        if self.task == "classification" and "train" not in self.splits:
            raise ValueError("the classes are those of the split `train`, which is missing")

    @property
    def sides(self) -> tuple[str, ...]:
        return SIDES[self.task]

    @property
    def rules(self) -> Rules:
        keep = self.task == "language-model" if self.keep_empty is None else self.keep_empty
        return Rules(keep, self.max_length)

    def vocabularies(self) -> dict[str, tuple[tuple[str, ...], TokenizerConfig | None]]:
        """Folders of tokenizers, with the sides they are for; labels have no config."""
        if self.task == "classification":
            return {"labels": (("label",), None), "tokenizer": (("text",), self.tokenizer)}
        if self.target_tokenizer is None:
            return {"tokenizer": (self.sides, self.tokenizer)}
        return {
            "tokenizer.source": (("source",), self.tokenizer),
            "tokenizer.target": (("target",), self.target_tokenizer),
        }


@dataclass(frozen=True)
class PrepareStatus:
    """How far preparing has come. stage: a split or a tokenizer's folder. bytes_total: 0 where it is not known, as for
    parquet."""

    stage: str
    samples: int
    tokens: int
    bytes_read: int
    bytes_total: int
    seconds: float

    @property
    def message(self) -> str:
        """One line: how much was done, and how fast."""
        parts = [f"{self.stage}: {self.samples:,} samples"]
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens")
        if self.seconds:
            parts.append(f"{self.samples / self.seconds:,.0f} samples/s")
        return ", ".join(parts)


Report = Callable[[PrepareStatus], None]


def prepare_text(
    config: TextDataConfig, folder: str | Path, workers: int | None = None, report: Report | None = None
) -> Prepared:
    """Tokenises all splits into `folder`, or what of them changed since the last call.

    workers: processes; default: one for each core when the data is worth it. report: called again and again with the
    progress. An error in one split leaves those before it in place.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return _Preparation(config, folder, workers, report or (lambda _: None)).run()


class _Preparation:
    def __init__(self, config: TextDataConfig, folder: Path, workers: int | None, report: Report) -> None:
        self.config, self.folder, self.workers, self.report = config, folder, workers, report
        try:
            self.before: Mapping[str, Any] = open_prepared(folder).description
        except ValueError:
            self.before = {}  # nothing there, or nothing of use
        if self.before.get("task", config.task) != config.task:
            raise ValueError(f"{folder} holds data for {self.before['task']}; prepare {config.task} in another folder")
        self.changes: dict[str, str] = {}
        self.description: dict[str, Any] = {"format": FORMAT, "task": config.task}

    def run(self) -> Prepared:
        before = self.before.get("splits", {})
        known = [record for split in before.values() for record in split["inputs"]]
        self.records = {name: source_records(source, known) for name, source in self.config.splits.items()}
        vocabularies = self.config.vocabularies()
        self.description["tokenizers"] = {
            name: self._tokenizer(name, sides, config) for name, (sides, config) in vocabularies.items()
        }
        self.description["sides"] = {side: name for name, (sides, _) in vocabularies.items() for side in sides}
        self.description["splits"] = {name: split for name, split in before.items() if self._still_good(name, split)}
        for name in self.config.splits:
            self.description["splits"][name] = self._split(name)
            self._write()
        return Prepared(self.folder, self.description, self.changes)

    # ------------------------------------------------------------------ tokenizers

    def _tokenizer(self, name: str, sides: tuple[str, ...], config: TokenizerConfig | None) -> dict[str, Any]:
        known = self.before.get("tokenizers", {}).get(name, {})
        files = [file_record(path, known.get("files", ())) for path in (config.paths() if config is not None else ())]
        key: dict[str, Any] = {"files": [record["sha256"] for record in files]}
        if config is None or config.reads_lines:
            key["input"] = self._content("train")
        # Where files lie does not matter, what they contain does.
        where = {"path", "codes", "dictionary"}
        key["options"] = config.model_dump(mode="json", exclude=where) if config is not None else "labels"
        reason = _difference(known.get("key"), key)
        if reason is None:
            try:
                tokenizer = load_tokenizer(self.folder / name)
                reason = None if tokenizer.fingerprint() == known["fingerprint"] else "its files changed"
            except ValueError:
                reason = "its files are damaged"
        if reason is not None:
            self._train(name, sides, config).save(self.folder / name)
            tokenizer = load_tokenizer(self.folder / name)
        self.changes[name] = REUSED if reason is None else reason
        return {"key": key, "files": files, "size": tokenizer.size, "fingerprint": tokenizer.fingerprint()}

    def _train(self, name: str, sides: tuple[str, ...], config: TokenizerConfig | None) -> Tokenizer:
        lines = self._lines(name, sides)
        return LabelTokenizer.train(lines) if config is None else train_tokenizer(config, lines)

    def _lines(self, stage: str, sides: tuple[str, ...]) -> Iterator[str]:
        """The text of these sides in `train`."""
        columns = [self.config.sides.index(side) for side in sides]
        meter = _Meter(stage, self.records["train"], self.report)
        samples = read_samples(self.config.splits["train"], self.config.sides, meter.position)
        for number, sample in enumerate(samples, 1):
            if number % 10_000 == 0:
                meter.show(number, 0)
            for column in columns:
                yield sample[column]

    # ------------------------------------------------------------------ splits

    def _content(self, split: str) -> dict[str, Any]:
        contents = [record["sha256"] for record in self.records[split]]
        return {"contents": contents, "read as": reading(self.config.splits[split])}

    def _tokenizer_key(self) -> dict[str, str]:
        prints = {name: tokenizer["fingerprint"] for name, tokenizer in self.description["tokenizers"].items()}
        return {side: prints[name] for side, name in self.description["sides"].items()}

    def _still_good(self, name: str, split: Mapping[str, Any]) -> bool:
        """A split of an earlier call that this one does not name stays, unless its tokenizer is gone."""
        if name in self.config.splits:
            return True
        if split["key"]["tokenizer"] == self._tokenizer_key():
            return True
        for side in self.config.sides:
            remove_store(self.folder / f"{name}.{side}")
        self.changes[name] = "removed: the tokenizer changed, and this call does not name its input"
        return False

    def _split(self, name: str) -> dict[str, Any]:
        rules = self.config.rules
        key = {
            "input": self._content(name),
            "tokenizer": self._tokenizer_key(),
            "options": {"keep_empty": rules.keep_empty, "max_length": rules.max_length},
        }
        known = self.before.get("splits", {}).get(name, {})
        reason = _difference(known.get("key"), key)
        if reason is None:
            try:
                stores = [TokenStore.open(self.folder / f"{name}.{side}") for side in self.config.sides]
                for store in stores:
                    store.verify()
                reason = None if all(store.meta["key"] == digest(key) for store in stores) else "its files changed"
            except ValueError:
                reason = "its files are damaged"
        self.changes[name] = REUSED if reason is None else reason
        if reason is None:
            return {**known, "inputs": self.records[name]}  # files may have been touched or moved
        try:
            return {"key": key, "inputs": self.records[name], **self._encode(name, digest(key))}
        except ValueError as error:
            raise ValueError(f"split {name}: {error}") from None

    def _encode(self, name: str, key: str) -> dict[str, Any]:
        """Writes the stores of a split; returns its counts."""
        sides = self.config.sides
        vocabularies = [self.description["sides"][side] for side in sides]
        meter = _Meter(name, self.records[name], self.report)
        read, unknown, skipped = 0, Counter[str](), Counter({EMPTY: 0, OVER_LONG: 0})
        with ExitStack() as stack:
            writers = []
            for side, vocabulary in zip(sides, vocabularies, strict=True):
                tokenizer = self.description["tokenizers"][vocabulary]
                meta = {"key": key, "tokenizer": tokenizer["fingerprint"]}
                meta["input"] = [record["sha256"] for record in self.records[name]]
                path = self.folder / f"{name}.{side}"
                writers.append(stack.enter_context(TokenWriter(path, dtype_for(tokenizer["size"]), meta)))
            for chunk in self._chunks(name, vocabularies, meter.position):
                for i, writer in enumerate(writers):
                    writer.add_many(chunk.tokens[i], chunk.lengths[i])
                    unknown[sides[i]] += chunk.unknown[i]
                read += chunk.read
                skipped.update(chunk.skipped)
                meter.show(read, sum(writer.total for writer in writers))
            if writers[0].count == 0:
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
                raise ValueError(f"no sample is left of {read:,}: {reasons}")
        tokens = {side: writer.total for side, writer in zip(sides, writers, strict=True)}
        unknowns = {side: unknown[side] for side in sides}
        counts = {"read": read, "samples": writers[0].count, "skipped": dict(skipped)}
        return {**counts, "tokens": tokens, "unknown": unknowns}

    def _chunks(self, name: str, vocabularies: list[str], position: Position) -> Iterator[Encoded]:
        source, sides, rules = self.config.splits[name], self.config.sides, self.config.rules
        folders = [self.folder / vocabulary for vocabulary in vocabularies]
        if not source.is_ids:
            return encoded_chunks(read_samples(source, sides, position), folders, rules, self._workers(name))
        if len(source.files) != len(sides):
            files = ", ".join(source.files)
            raise ValueError(f"{len(sides)} files of token numbers are needed ({', '.join(sides)}); got {files}")
        return array_chunks(source.files, [load_tokenizer(folder) for folder in folders], rules)

    def _workers(self, name: str) -> int:
        if self.workers is not None:
            return self.workers
        size = sum(record["size"] for record in self.records[name])
        return 1 if size < SMALL else _cores()

    def _write(self) -> None:
        write_metadata(self.folder / DESCRIPTION, self.description)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Meter:
    """Reports how far a stage has come."""

    def __init__(self, stage: str, records: list[dict[str, Any]], report: Report) -> None:
        self.stage, self.report = stage, report
        self.total = sum(record["size"] for record in records)
        self.position = Position()
        self.start = time.monotonic()

    def show(self, samples: int, tokens: int) -> None:
        seconds = time.monotonic() - self.start
        self.report(PrepareStatus(self.stage, samples, tokens, self.position.bytes, self.total, seconds))


def _difference(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Why something has to be done again, in words; None: nothing changed."""
    if before is None:
        return "new"
    changed = [part for part in {**before, **now} if before.get(part) != now.get(part)]
    return f"{' and '.join(changed)} changed" if changed else None
