"""What tasks on text share: where their samples come from, as text and as prepared tokens.

Embedded sets are written to the run's folder once and prepared like files. Evaluation reads text as it was given, not
from prepared tokens: what preparing skips (empty and over-long samples) counts there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field
from torch import Tensor

from subquad.config import nearest
from subquad.data.batches import Budget
from subquad.data.blocks import BlockOptions, Blocks
from subquad.data.builtin import BuiltinSet
from subquad.data.builtin.files import write_embedded
from subquad.data.fairseq.folder import FairseqFolder
from subquad.data.text.prepare import ReportProgress, TextDataConfig, prepare_text
from subquad.data.text.reading import ON_ERROR, OnErrorOption, ReadingReport
from subquad.data.text.sources import TextSource, read_samples
from subquad.data.text.store import FIELDS, PreparedText, open_prepared
from subquad.data.tokenizers import RUN, SAVED, Tokenizer, TokenizerConfig, build_tokenizer, check_same_tokens
from subquad.evaluate.ngrams import CHUNK_TOKENS, PairCounts
from subquad.evaluate.perplexity import TokenLines, perplexity_score
from subquad.files import wrap_corrupt_data_errors
from subquad.mixers.layout import Padding
from subquad.tasks.base import (
    TOKENIZERS,
    DataConfig,
    Floor,
    Task,
    TrainedModel,
    add_perplexity,
    check_split,
    load_embedded,
)

AS_GIVEN, FROM_TOKENS = "as given", "decoded from prepared tokens, without the samples that preparing skipped"
DEFAULT_TOKENS = 4096
"""The assumed tokens of a batch, for an estimate of memory, if the recipe does not limit them."""


class TextData(DataConfig):
    """Where text comes from.

    It is an embedded set, a folder that `subquad data prepare` or fairseq-preprocess wrote, or text files.
    """

    embedded: str | None = Field(
        None,
        description="An embedded data set: phrases for translation, listops for classification, speeches for language "
        "models.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The options of the embedded data set.")
    folder: str | None = Field(None, description="A folder that `subquad data prepare` wrote.")
    splits: dict[str, TextSource] = Field(default_factory=dict, description="Files of each split: train, valid, test.")
    fairseq: FairseqFolder | None = Field(
        None, description="A folder that fairseq-preprocess wrote: its path, or path, languages and codes."
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="The tokenizer of unprepared text.")
    max_length: int | None = Field(None, ge=1, description="Samples with more tokens are skipped and counted.")
    on_error: OnErrorOption = Field("stop", description=ON_ERROR)

    alternatives = MappingProxyType({"embedded": ("options",), "folder": (), "splits": (), "fairseq": ()})
    task: ClassVar[str]
    """The task that reads it."""
    sample_kind: ClassVar[str]
    """What a sample is: see `TextDataConfig`."""
    embedded_kind: ClassVar[str]
    """What an embedded set must hold."""

    def check(self) -> None:
        given = [name for name in self.alternatives if getattr(self, name)]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            whole = f"; data:={{{given[-1]}: ...}} on a command line replaces the whole section" if given else ""
            raise ValueError(f"give one of embedded, folder, splits and fairseq (got {got}){whole}")
        configs = list(self.tokenizer_configs().values())
        if self.fairseq is not None and configs != [TokenizerConfig()] and self.tokenizer.kind != RUN:
            raise ValueError("the dictionaries of data.fairseq are its tokenizers; leave tokenizer out")
        if self.splits and "train" not in self.splits:
            raise ValueError(f"splits need a split `train` (got {', '.join(self.splits)})")

    @property
    def longest(self) -> int | None:
        """Samples with more tokens than this are skipped when text is prepared."""
        return self.max_length

    def tokenizer_configs(self) -> dict[str, TokenizerConfig]:
        """The configs of the recipe's tokenizers, by the names of their options."""
        return {"tokenizer": self.tokenizer}

    @classmethod
    def make_room(cls, given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        kept = super().make_room(given, changes)
        if changes.get("fairseq") and (kept.get("tokenizer") or {}).get("kind") != RUN:
            return {name: value for name, value in kept.items() if name not in ("tokenizer", "target_tokenizer")}
        return kept

    def with_run_tokenizers(self) -> Self:
        return self.model_copy(update={"tokenizer": TokenizerConfig(kind=RUN)})

    def in_run(self, run: Path) -> Self:
        if self.tokenizer.kind != RUN:
            return self
        return self.model_copy(update={"tokenizer": saved_tokenizer(run, "text")})

    # ------------------------------------------------------------------ files

    def split_files(self, split: str) -> Sequence[str] | None:
        if not self.splits:
            return None
        return self.splits[split].files if split in self.splits else ()

    def input_files(self) -> dict[str, list[str]]:
        files = {split: list(source.files) for split, source in self.splits.items() if not source.is_hub}
        if self.folder is not None:
            files["folder"] = [self.folder]
        if self.fairseq is not None:
            files["folder"] = [self.fairseq.path, *filter(None, [self.fairseq.codes])]
        for name, config in self.tokenizer_configs().items():
            if paths := [path for path in (config.path, config.codes, config.dictionary) if path is not None]:
                files[name.replace("_", " ")] = paths
        return files

    def check_first_sample(self, split: str) -> None:
        if split == "folder" and self.fairseq is not None:
            self.fairseq.read_vocabularies(self.sample_kind)
        source = self.splits.get(split)
        if source is not None and not source.is_ids:
            next(read_samples(source, FIELDS[self.sample_kind], report=ReadingReport(self.on_error)))

    def count_vocabularies(self) -> list[int]:
        return [] if self.fairseq is None else self.fairseq.count_vocabularies(self.sample_kind)

    def is_available(self, cache: Path) -> bool:
        return self.folder is not None or cache.exists()

    # ------------------------------------------------------------------ samples

    def raw_samples(self, split: str) -> list[tuple[str, ...]] | None:
        """Every sample of a split as it was given, also those that preparing skips; None: only tokens are there."""
        if self.folder is not None or self.fairseq is not None:
            return None
        if self.embedded is not None:
            samples = self._load_embedded().split(split)
            return [(sample,) if isinstance(sample, str) else tuple(sample) for sample in samples]
        check_split(split, self.splits)
        source = self.splits[split]
        report = ReadingReport(self.on_error)
        return None if source.is_ids else list(read_samples(source, FIELDS[self.sample_kind], report=report))

    def prepare(self, cache: Path, report: ReportProgress | None = None, split: str | None = None) -> PreparedText:
        """The text as tokens. cache: where they are written if they are not prepared yet.

        split: the only one that is needed; the others are left out if the tokenizers are there without them.
        """
        if self.folder is not None:
            with wrap_corrupt_data_errors(f"the data in {self.folder}"):
                prepared = open_prepared(self.folder)
                prepared.verify()
            return prepared
        if self.fairseq is not None:
            config = self.fairseq.text_config(self.sample_kind, self.longest)
            if self.tokenizer.kind == SAVED:  # the run's own, which may split raw text where the folder has ids only
                for name, own in self.tokenizer_configs().items():
                    theirs = build_tokenizer(getattr(config, name))
                    check_same_tokens(build_tokenizer(own), theirs, f"the dictionary in {self.fairseq.path}")
                config = config.model_copy(update=self.tokenizer_configs())
            return prepare_text(config if split is None else config.for_split(split), cache, report=report)
        splits = dict(self.splits)
        if self.embedded is not None:
            found = self._load_embedded()
            cache.mkdir(parents=True, exist_ok=True)
            files = write_embedded(found, cache)
            splits = TextDataConfig.parse(
                "data", {"sample_kind": self.sample_kind, "splits": {split: str(path) for split, path in files.items()}}
            ).splits
        options: dict[str, Any] = {"sample_kind": self.sample_kind, "splits": splits, "max_length": self.longest}
        options |= {"on_error": self.on_error, **self.tokenizer_configs()}
        config = TextDataConfig.parse("data", options)
        return prepare_text(config if split is None else config.for_split(split), cache, report=report)

    def prepare_for_training(self, cache: Path, report: ReportProgress | None = None) -> PreparedText:
        """The text as tokens. Data of another task, or without the splits `train` and `valid`, is refused."""
        data = self.prepare(cache, report)
        if data.sample_kind != self.sample_kind:
            raise ValueError(f"{data.folder} holds {data.sample_kind}, but task {self.task} needs {self.sample_kind}")
        for split in ("train", "valid"):
            if split not in data.splits:
                raise ValueError(f"{data.folder} has no split {split!r}{nearest(split, data.splits)}")
        return data

    def _load_embedded(self) -> BuiltinSet:
        assert self.embedded is not None
        return load_embedded(self.embedded, self.options, self.embedded_kind, self.task)


def saved_tokenizer(run: Path, side: str) -> TokenizerConfig:
    """The config of the tokenizer that a run directory has for a side: source, target or text."""
    path = (run / TOKENIZERS / side).resolve()
    if not path.is_dir():
        raise ValueError(
            f"{run} has no tokenizer {TOKENIZERS}/{side}, which data.tokenizer asks for with kind run; only runs that "
            "were imported, or that began with the weights of another run, have tokenizers before they are trained"
        )
    return TokenizerConfig(kind=SAVED, path=str(path))


class TextTask(Task):
    """A task on prepared text."""

    def __init__(self, data: PreparedText, smoothing: float = 0.0, aux_weight: float = 0.0) -> None:
        super().__init__(smoothing, aux_weight)
        self.data = data

    @property
    def split_names(self) -> Sequence[str]:
        return self.data.splits

    def notes(self) -> dict[str, str]:
        notes = {split: [f"samples skipped: {reasons}"] for split, reasons in self.data.skipped().items()}
        for split, noticed in self.data.reading_notes().items():
            notes.setdefault(split, []).extend(noticed)
        return {split: "; ".join(parts) for split, parts in notes.items()}


class WordTask(TextTask):
    """A task on prepared text whose targets are words."""

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        return add_perplexity(super().metrics(sums, count))


class BlockTask(WordTask):
    """A task on text of one side, which is cut into blocks of tokens."""

    extra_symbols: ClassVar[int] = 0
    """Symbols that the model has beside those of the tokenizer."""

    def __init__(
        self, data: PreparedText, blocks: BlockOptions, smoothing: float = 0.0, aux_weight: float = 0.0
    ) -> None:
        super().__init__(data, smoothing, aux_weight)
        self.blocks, self.tokenizer = blocks, data.tokenizer("text")

    def data_dependent_model_config(self) -> dict[str, Any]:
        return {"vocab": self.tokenizer.size + self.extra_symbols, "embedding": {"pad": self.tokenizer.pad}}

    @classmethod
    def expected_model_config(cls, data: TextData) -> dict[str, Any]:
        size = next(iter(data.count_vocabularies()), data.tokenizer.vocab_size)
        return {} if size is None else {"vocab": size + cls.extra_symbols}

    @classmethod
    def typical_batch(cls, data: Any, budget: Budget) -> tuple[int, int | None]:
        return typical_text_batch(budget, data.blocks.tokens_per_sample)

    @classmethod
    def at_length(cls, data: Any, model: Mapping[str, Any], budget: Budget, length: int) -> dict[str, Any]:  # noqa: ARG003
        if data.blocks.breaks != "none":
            raise ValueError("blocks have a length of their own only with data.blocks.breaks: none")
        return {"data.blocks.tokens_per_sample": length}

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"text": self.tokenizer}

    def count_pairs(self) -> PairCounts:
        """The neighbouring tokens of the training text, the ends of lines among them."""
        counts = PairCounts(self.tokenizer.size + self.extra_symbols)
        stream = Blocks(self.data.store("train", "text"), self.blocks, self.tokenizer.eos)
        for begin in range(0, stream.total, CHUNK_TOKENS):
            counts.add(*stream.window(begin, min(stream.total, begin + CHUNK_TOKENS)))
        return counts

    def evaluated_lines(self, data: TextData, split: str) -> TokenLines:
        """The tokens of a split as evaluation reads them: of the text as it was given, where it is there."""
        lines, _ = text_of_split(data, self.data.folder, split)
        return TokenLines(self.tokenizer.encode_batch([line for (line,) in lines]))

    @property
    def pad(self) -> int:
        return self.tokenizer.pad

    @classmethod
    def chance_level(cls, model_config: Mapping[str, Any], samples: int) -> float:  # noqa: ARG003
        """Half the size of the vocabulary. Uniform guessing has the perplexity of all of it, word counts far less."""
        return model_config["vocab"] / 2


def counted_floors(counts: PairCounts, unigram: np.ndarray, name: str, neighbours: np.ndarray, how: str) -> list[Floor]:
    """The perplexities of a unigram and of a model of neighbours, from the log-probabilities of the scored tokens."""
    values = [perplexity_score(np.array([-log_probs.sum(), len(log_probs)])) for log_probs in (unigram, neighbours)]
    frequency = (
        f"The frequencies in the {counts.counts.sum():,} tokens of the training text, with absolute discounting."
    )
    return [
        Floor(name="unigram", kind="trivial", value=values[0], how=frequency),
        Floor(name=name, kind="linear", value=values[1], how=how),
    ]


def typical_text_batch(budget: Budget, length: int) -> tuple[int, int]:
    """The samples of a batch and the tokens of each: `length`, or as many as the batch may have."""
    tokens = budget.max_tokens or DEFAULT_TOKENS
    length = min(tokens, length)
    if budget.max_sentences and budget.max_tokens is None:
        return budget.max_sentences, length
    return min(budget.max_sentences or tokens, max(1, tokens // length)), length


def drop_empty_padding(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the CPU without a `padding` that is False everywhere: mechanisms are faster without one."""
    return batch if batch["padding"].any() else {name: value for name, value in batch.items() if name != "padding"}


def right_padding(padding: Tensor | None) -> Padding | None:
    """A batch's padding (batch, time), which is at the right, as models take it; None: there is none."""
    return None if padding is None else Padding.right(padding.logical_not().sum(1), padding.shape[1])


def read_text(run: TrainedModel, split: str, most: int | None = None) -> tuple[list[tuple[str, ...]], str]:
    """The samples of a split, or the first `most` of them, and where they come from."""
    assert isinstance(run.data, TextData)
    # of data that was changed since training there may be other tokens in the run
    return text_of_split(run.data, run.prepared_data, split, most)


def text_of_split(
    data: TextData, prepared_data: Path | None, split: str, most: int | None = None
) -> tuple[list[tuple[str, ...]], str]:
    """The same of data that was prepared in a folder; None: it was not yet."""
    samples = data.raw_samples(split)
    if samples is not None:
        return samples[:most], AS_GIVEN
    with TemporaryDirectory() as scratch:
        # If the data was changed after training, the tokens in the run are not those of the split.
        own = data.folder or prepared_data
        prepared = open_prepared(own) if own is not None else data.prepare(Path(scratch), split=split)
        sides = []
        for side in prepared.fields:
            tokenizer, store = prepared.tokenizer(side), prepared.store(split, side)
            sides.append([tokenizer.decode(store[number]) for number in range(len(store))[:most]])
    return list(zip(*sides, strict=True)), FROM_TOKENS


def cut_lines(lines: list[list[int]], most: int | None, special: int = 1) -> list[list[int]]:
    """Cuts lines to the `most` tokens that a model can read, of which `special` are its special tokens."""
    return lines if most is None else [line[: most - special] for line in lines]
