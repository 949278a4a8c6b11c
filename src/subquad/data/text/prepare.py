"""Turns text files into a folder of memory-mapped token ids. A second call redoes only what changed.

    data.json                      inputs, tokenizers, options, counts, and how many samples were skipped and why
    tokenizer/                     or tokenizer.source/ and tokenizer.target/; labels/ for the names of classes
    train.source.tokens, ...       a token store for each split and field

A split is redone if the content of its input, its tokenizers or the options differ from what data.json says.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from subquad.config import Options
from subquad.data.text.arrays import read_token_chunks
from subquad.data.text.encode import EMPTY, OVER_LONG, UNREADABLE, SkipRules, TokenChunk, encode_samples
from subquad.data.text.files import ReadCounter, file_record
from subquad.data.text.reading import ON_ERROR, OnErrorOption, ReadingReport
from subquad.data.text.sources import TextSource, read_samples
from subquad.data.text.store import (
    DESCRIPTION,
    DESCRIPTION_FORMAT,
    FIELDS,
    PreparedText,
    TokenStore,
    TokenWriter,
    dtype_for,
    open_prepared,
    remove_store,
    remove_temporary_files,
)
from subquad.data.text.token_tables import read_table_chunks
from subquad.data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer, load_tokenizer
from subquad.data.tokenizers.simple import LabelTokenizer
from subquad.files import digest, write_metadata

SampleKind = Literal["pairs", "text", "labelled"]
SMALL_INPUT = 16 << 20  # bytes below which starting processes costs more time than it saves
REUSED = "reused"


class TextDataConfig(Options):
    """What to prepare: the files of each split, the tokenizers, and which samples are skipped."""

    sample_kind: SampleKind = Field(
        "pairs",
        description="What a sample is: pairs (source and target), text (text alone), or labelled (label and text).",
    )
    splits: dict[str, TextSource] = Field(
        min_length=1, description="The files of each split. Tokenizers are trained on the split `train`."
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="The tokenizer of the text, of both languages of pairs."
    )
    target_tokenizer: TokenizerConfig | None = Field(
        None,
        description="For pairs: a separate tokenizer for the target. With null both languages share one, which "
        "is trained on both.",
    )
    max_length: int | None = Field(
        None, ge=1, description="Samples with more tokens than this in a field are skipped and counted."
    )
    keep_empty: bool | None = Field(
        None,
        description="Whether samples with a field that is empty, or white space, are kept. By default only samples of "
        "text alone are.",
    )
    on_error: OnErrorOption = Field("stop", description=ON_ERROR)

    @field_validator("splits")
    @classmethod
    def _check_split_names(cls, splits: dict[str, TextSource]) -> dict[str, TextSource]:
        for name in splits:
            if not name or not all(letter.isalnum() or letter in "_-" for letter in name):
                raise ValueError(f"the name of a split has letters, digits, _ and - only, not {name!r}")
        return splits

    def check(self) -> None:
        if self.target_tokenizer is not None and self.sample_kind != "pairs":
            raise ValueError(f"target_tokenizer is for pairs; samples of kind {self.sample_kind} have one tokenizer")
        for config in (self.tokenizer, self.target_tokenizer):
            if config is not None and config.needs_text and "train" not in self.splits:
                raise ValueError(f"tokenizer {config.kind} is trained on the split `train`, which is missing")
            if config is not None and config.needs_text and self.splits["train"].is_ids:
                raise ValueError(
                    f"tokenizer {config.kind} is trained on text, but `train` holds token ids: give the tokenizer that "
                    "made them (kind file, sentencepiece, saved, ...), or kind ids and vocab_size"
                )
        for source in self.splits.values():
            source.check_folder(self.fields)
        if self.sample_kind == "labelled" and "train" not in self.splits:
            raise ValueError("the classes are those of the split `train`, which is missing")

    @property
    def fields(self) -> tuple[str, ...]:
        return FIELDS[self.sample_kind]

    @property
    def rules(self) -> SkipRules:
        keep = self.sample_kind == "text" if self.keep_empty is None else self.keep_empty
        return SkipRules(keep, self.max_length)

    def for_split(self, split: str) -> Self:
        """The config of one split, unless a tokenizer is trained on another one."""
        trained = any(config is None or config.needs_text for _, config in self.vocabularies().values())
        if trained or split not in self.splits:
            return self
        return self.model_copy(update={"splits": {split: self.splits[split]}})

    def vocabularies(self) -> dict[str, tuple[tuple[str, ...], TokenizerConfig | None]]:
        """Returns by the name of a tokenizer's folder the fields that it is for, and its config (labels have none)."""
        if self.sample_kind == "labelled":
            return {"labels": (("label",), None), "tokenizer": (("text",), self.tokenizer)}
        if self.target_tokenizer is None:
            return {"tokenizer": (self.fields, self.tokenizer)}
        return {
            "tokenizer.source": (("source",), self.tokenizer),
            "tokenizer.target": (("target",), self.target_tokenizer),
        }


@dataclass(frozen=True)
class PrepareStatus:
    """How far `prepare_text` has come.

    stage: the split that is encoded, or the folder of the tokenizer that is trained. bytes_total is 0 if the size is
    not known, as for parquet.
    """

    stage: str
    samples: int
    tokens: int
    bytes_read: int
    bytes_total: int
    seconds: float

    @property
    def message(self) -> str:
        """One line that says how much was done, and how fast."""
        parts = [f"{self.stage}: {self.samples:,} samples"]
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens")
        if self.seconds:
            parts.append(f"{self.samples / self.seconds:,.0f} samples/s")
        return ", ".join(parts)


ReportProgress = Callable[[PrepareStatus], None]


def prepare_text(
    config: TextDataConfig, folder: str | Path, workers: int | None = None, report: ReportProgress | None = None
) -> PreparedText:
    """Tokenises all splits into `folder`, except those that have not changed since the last call.

    workers: the number of processes. By default large inputs get one for each core. report: is called repeatedly with
    the progress. An error in one split leaves the splits before it in place.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return _Preparation(config, folder, workers, report or (lambda _: None)).run()


class _Preparation:
    """One call of `prepare_text`. `before` is the data.json of the call before, or empty."""

    def __init__(self, config: TextDataConfig, folder: Path, workers: int | None, report: ReportProgress) -> None:
        self.config, self.folder, self.workers, self.report = config, folder, workers, report
        try:
            self.before: Mapping[str, Any] = open_prepared(folder).description
        except ValueError:
            self.before = {}  # there is nothing, or nothing that can be used
        if (kind := self.before.get("sample_kind", config.sample_kind)) != config.sample_kind:
            raise ValueError(f"{folder} holds {kind}; prepare {config.sample_kind} in another folder")
        self.changes: dict[str, str] = {}
        self.description: dict[str, Any] = {"format": DESCRIPTION_FORMAT, "sample_kind": config.sample_kind}

    def run(self) -> PreparedText:
        remove_temporary_files(self.folder)
        before = self.before.get("splits", {})
        known = [record for split in before.values() for record in split["inputs"]]
        self.records = {name: source.content_records(known) for name, source in self.config.splits.items()}
        vocabularies = self.config.vocabularies()
        self.description["tokenizers"] = {
            name: self._update_tokenizer(name, fields, config) for name, (fields, config) in vocabularies.items()
        }
        self.description["fields"] = {field: name for name, (fields, _) in vocabularies.items() for field in fields}
        self.description["splits"] = {name: split for name, split in before.items() if self._is_current(name, split)}
        for name in self.config.splits:
            self.description["splits"][name] = self._update_split(name)
            write_metadata(self.folder / DESCRIPTION, self.description)
        return PreparedText(self.folder, self.description, self.changes)

    # ------------------------------------------------------------------ tokenizers

    def _update_tokenizer(self, name: str, fields: tuple[str, ...], config: TokenizerConfig | None) -> dict[str, Any]:
        """Trains or loads the tokenizer of a folder, unless it is there already. Returns its entry of data.json."""
        known = self.before.get("tokenizers", {}).get(name, {})
        files = [file_record(path, known.get("files", ())) for path in (config.paths() if config is not None else ())]
        key: dict[str, Any] = {"files": [record["sha256"] for record in files]}
        if config is None or config.needs_text:
            key["input"] = self._input_key("train")
        # The paths of files do not matter, but their contents do.
        paths = {"path", "codes", "dictionary"}
        key["options"] = config.model_dump(mode="json", exclude=paths) if config is not None else "labels"
        reason = _what_changed(known.get("key"), key)
        if reason is None:
            try:
                tokenizer = load_tokenizer(self.folder / name)
                reason = None if tokenizer.fingerprint() == known["fingerprint"] else "its files changed"
            except ValueError:
                reason = "its files are damaged"
        if reason is not None:
            self._build_tokenizer(name, fields, config).save(self.folder / name)
            tokenizer = load_tokenizer(self.folder / name)
        self.changes[name] = REUSED if reason is None else reason
        return {"key": key, "files": files, "size": tokenizer.size, "fingerprint": tokenizer.fingerprint()}

    def _build_tokenizer(self, name: str, fields: tuple[str, ...], config: TokenizerConfig | None) -> Tokenizer:
        lines = self._training_lines(name, fields)
        return LabelTokenizer.train(lines) if config is None else build_tokenizer(config, lines)

    def _training_lines(self, stage: str, fields: tuple[str, ...]) -> Iterator[str]:
        """Yields the text of these fields in the split `train`."""
        columns = [self.config.fields.index(field) for field in fields]
        meter = _ProgressMeter(stage, self.records["train"], self.report)
        report = ReadingReport(self.config.on_error)
        samples = read_samples(self.config.splits["train"], self.config.fields, meter.counter, report)
        for number, sample in enumerate(samples, 1):
            if number % 10_000 == 0:
                meter.update(number, 0)
            for column in columns:
                yield sample[column]

    # ------------------------------------------------------------------ splits

    def _input_key(self, split: str) -> dict[str, Any]:
        contents = [record["sha256"] for record in self.records[split]]
        read_as = self.config.splits[split].reading_options()
        return {
            "contents": contents,
            "read as": read_as | ({"on_error": "skip"} if self.config.on_error == "skip" else {}),
        }

    def _tokenizer_key(self) -> dict[str, str]:
        prints = {name: tokenizer["fingerprint"] for name, tokenizer in self.description["tokenizers"].items()}
        return {field: prints[name] for field, name in self.description["fields"].items()}

    def _is_current(self, name: str, split: Mapping[str, Any]) -> bool:
        """Returns whether a split of an earlier call can stay. If its tokenizer changed, its files are removed."""
        if name in self.config.splits:
            return True
        if split["key"]["tokenizer"] == self._tokenizer_key():
            return True
        for field in self.config.fields:
            remove_store(self.folder / f"{name}.{field}")
        self.changes[name] = "removed: the tokenizer changed, and this call does not name its input"
        return False

    def _update_split(self, name: str) -> dict[str, Any]:
        """Encodes a split, unless its stores are up to date. Returns its entry of data.json."""
        rules = self.config.rules
        key = {
            "input": self._input_key(name),
            "tokenizer": self._tokenizer_key(),
            "options": {"keep_empty": rules.keep_empty, "max_length": rules.max_length},
        }
        known = self.before.get("splits", {}).get(name, {})
        reason = _what_changed(known.get("key"), key)
        if reason is None:
            try:
                stores = [TokenStore.open(self.folder / f"{name}.{field}") for field in self.config.fields]
                for store in stores:
                    store.verify()
                reason = None if all(store.meta["key"] == digest(key) for store in stores) else "its files changed"
            except ValueError:
                reason = "its files are damaged"
        self.changes[name] = REUSED if reason is None else reason
        if reason is None:
            return {**known, "inputs": self.records[name]}  # the input may have been moved without a change
        try:
            return {"key": key, "inputs": self.records[name], **self._encode(name, digest(key))}
        except ValueError as error:
            raise ValueError(f"split {name}: {error}") from None

    def _encode(self, name: str, key: str) -> dict[str, Any]:
        """Writes the stores of a split. Returns its counts."""
        fields = self.config.fields
        vocabularies = [self.description["fields"][field] for field in fields]
        meter = _ProgressMeter(name, self.records[name], self.report)
        read, unknown, skipped = 0, Counter[str](), Counter({EMPTY: 0, OVER_LONG: 0})
        report = ReadingReport(self.config.on_error)
        with ExitStack() as stack:
            writers = []
            for field, vocabulary in zip(fields, vocabularies, strict=True):
                tokenizer = self.description["tokenizers"][vocabulary]
                meta = {"key": key, "tokenizer": tokenizer["fingerprint"]}
                meta["input"] = [record["sha256"] for record in self.records[name]]
                path = self.folder / f"{name}.{field}"
                writers.append(stack.enter_context(TokenWriter(path, dtype_for(tokenizer["size"]), meta)))
            for chunk in self._chunks(name, vocabularies, meter.counter, report):
                for i, writer in enumerate(writers):
                    writer.add_many(chunk.tokens[i], chunk.lengths[i])
                    unknown[fields[i]] += chunk.unknown[i]
                read += chunk.num_read
                skipped.update(chunk.skipped)
                meter.update(read, sum(writer.total for writer in writers))
            if report.unreadable:
                skipped[UNREADABLE] = report.unreadable
                read += report.unreadable
            if writers[0].count == 0:
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
                raise ValueError(f"no sample is left of {read:,}: {reasons}")
        tokens = {field: writer.total for field, writer in zip(fields, writers, strict=True)}
        unknowns = {field: unknown[field] for field in fields}
        counts = {"read": read, "samples": writers[0].count, "skipped": dict(skipped)}
        return {**counts, "tokens": tokens, "unknown": unknowns, **report.to_dict()}

    def _chunks(
        self, name: str, vocabularies: list[str], counter: ReadCounter, report: ReadingReport
    ) -> Iterator[TokenChunk]:
        source, fields, rules = self.config.splits[name], self.config.fields, self.config.rules
        folders = [self.folder / vocabulary for vocabulary in vocabularies]
        if not source.is_ids:
            samples = read_samples(source, fields, counter, report)
            return encode_samples(samples, folders, rules, self._num_workers(name))
        if source.is_hub or source.columns:
            return read_table_chunks(source, fields, [load_tokenizer(folder) for folder in folders], rules)
        if len(source.files) != len(fields):
            files = ", ".join(source.files)
            raise ValueError(f"{len(fields)} files of token ids are needed ({', '.join(fields)}); got {files}")
        return read_token_chunks(source.files, [load_tokenizer(folder) for folder in folders], rules)

    def _num_workers(self, name: str) -> int:
        if self.workers is not None:
            return self.workers
        size = sum(record["size"] for record in self.records[name])
        return 1 if size < SMALL_INPUT else _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _ProgressMeter:
    """Reports how far a stage has come."""

    def __init__(self, stage: str, records: list[dict[str, Any]], report: ReportProgress) -> None:
        self.stage, self.report = stage, report
        self.total = sum(record["size"] for record in records)
        self.counter = ReadCounter()
        self.start = time.monotonic()

    def update(self, samples: int, tokens: int) -> None:
        seconds = time.monotonic() - self.start
        self.report(PrepareStatus(self.stage, samples, tokens, self.counter.bytes, self.total, seconds))


def _what_changed(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Returns in words why something has to be redone, or None if nothing changed."""
    if before is None:
        return "new"
    changed = [part for part in {**before, **now} if before.get(part) != now.get(part)]
    return f"{' and '.join(changed)} changed" if changed else None
