"""Recall: the right symbols at chosen positions, of a causal language model.

A sample is two aligned sequences, inputs (T,) and targets (T,). Where the target is a symbol, the model is asked for it
after it has read the inputs up to and including this position; everywhere else nothing is asked, and nothing counts
for the loss. The metric is the share of right symbols among those that were asked for.

Samples are generated (`data/builtin/`), or read from tables with the columns `text` and `targets`: symbols between
white space, equally many in both, with `_` in `targets` where nothing is asked.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.data.batches import Batch, Budget, to_device
from subquad.data.blocks import collate_blocks
from subquad.data.builtin import SPLITS
from subquad.data.builtin.recall import RecallOptions, RecallSplit
from subquad.data.text.prepare import ReportProgress
from subquad.data.text.reading import ReadingReport
from subquad.data.text.sources import TextSource, read_samples
from subquad.data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from subquad.evaluate.accuracy import accuracy_score, class_ranks
from subquad.evaluate.measure import Measure
from subquad.evaluate.ngrams import PairCounts
from subquad.evaluate.report import Evaluation
from subquad.kernels.cross_entropy import chunk_rows
from subquad.models import LanguageModel
from subquad.models.base import mean_aux
from subquad.tasks.base import (
    DataConfig,
    EvaluationOptions,
    Floor,
    MainMetric,
    Task,
    TrainedModel,
    check_split,
    load_embedded,
    register_task,
)
from subquad.tasks.losses import LossOutput, target_index, word_loss
from subquad.tasks.sample_shards import SampleShards, fingerprint
from subquad.tasks.text import typical_text_batch

FIELDS = ("text", "targets")
NOT_ASKED = "_"
"""What stands in `targets` where nothing is asked."""
TYPICAL_LENGTH = 256
"""The assumed symbols of a sample in a file, for an estimate of memory before the data is read."""
COUNTED_SAMPLES = 2_000
"""The most training samples in which the floors count answers."""
RANDOM_TARGETS_EVERY = 8
"""In a random batch every so many positions are asked."""

Sample = tuple[np.ndarray, np.ndarray]
"""Inputs (T,) and targets (T,), token ids; `pad` is the target where nothing is asked."""


class RecallData(DataConfig):
    """Where the samples come from: a generated set, or tables with the columns `text` and `targets`."""

    embedded: str | None = Field(
        None, description="A generated set: associative_recall, selective_copying or fuzzy_recall."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The options of the generated set.")
    splits: dict[str, TextSource] = Field(
        default_factory=dict, description="Tables (CSV, TSV or JSONL) of each split: train, valid, test."
    )

    alternatives = MappingProxyType({"embedded": ("options",), "splits": ()})

    def check(self) -> None:
        if bool(self.embedded) == bool(self.splits):
            raise ValueError(f"give one of embedded and splits (got {'both' if self.splits else 'none'})")
        if self.splits and not {"train", "valid"} <= self.splits.keys():
            raise ValueError(f"splits need `train` and `valid` (got {', '.join(self.splits)})")
        if self.embedded:
            self.generator()

    def split_files(self, split: str) -> Sequence[str] | None:
        if not self.splits:
            return None
        return self.splits[split].files if split in self.splits else ()

    def input_files(self) -> dict[str, list[str]]:
        return {split: list(source.files) for split, source in self.splits.items() if not source.is_hub}

    def check_first_sample(self, split: str) -> None:
        if split in self.splits:
            next(self.read(split))

    def generator(self) -> RecallOptions:
        """What makes the samples of a generated set."""
        assert self.embedded is not None
        return load_embedded(self.embedded, self.options, "recall", RecallTask.name).train.options

    def read(self, split: str) -> Iterator[tuple[list[str], list[str]]]:
        """Yields the symbols of the text and of the targets of every sample of a split of files."""
        source = self.splits[split]
        if not source.columns and source.kind == "jsonl":
            source = source.model_copy(update={"columns": FIELDS})
        named = source.kind in ("csv", "tsv") and any(isinstance(column, str) for column in source.columns)
        line = 2 if source.header or (named and source.header is None) else 1
        report = ReadingReport()
        for number, sample in enumerate(read_samples(source, FIELDS, report=report)):
            line += number == 0 and report.header is not None
            text, targets = (field.split() for field in sample)
            if len(text) != len(targets):
                counts = f"{len(text):,} symbols of text and {len(targets):,} targets"
                hint = f"write {NOT_ASKED} in targets where nothing is asked"
                raise ValueError(f"{source.files[0]}, line {line}: {counts}, but they belong together; {hint}")
            if not text:
                raise ValueError(f"{source.files[0]}, line {line}: there are no symbols")
            yield text, targets
            line += 1 + sum(field.count("\n") for field in sample)

    def train_tokenizer(self) -> Tokenizer:
        """A vocabulary of all symbols of the training data."""
        if self.embedded:
            return build_tokenizer(TokenizerConfig(kind="words"), [_all_symbols(self.generator())])
        lines = (" ".join([*text, *_asked(targets)]) for text, targets in self.read("train"))
        return build_tokenizer(TokenizerConfig(kind="words"), lines)

    def open_split(self, split: str, tokenizer: Tokenizer) -> "RecallSamples":
        """The samples of a split. One in which nothing is asked at all is refused."""
        if self.embedded:
            check_split(split, SPLITS)
            options = self.generator()
            ids = np.array([*tokenizer.encode(_all_symbols(options)), tokenizer.pad])  # NOTHING is -1: the last one
            made = RecallSplit(options, split)

            def generate(number: int) -> Sample:
                inputs, targets = made[number]
                return ids[inputs], ids[targets]

            return RecallSamples(generate, np.full(len(made), options.length), tokenizer.pad)
        check_split(split, self.splits)
        samples = [_encode(text, targets, tokenizer) for text, targets in self.read(split)]
        if not any((targets != tokenizer.pad).any() for _, targets in samples):
            raise ValueError(f"{self.splits[split].files[0]}: nothing is asked: all targets are {NOT_ASKED}")
        lengths = np.array([len(targets) for _, targets in samples])
        return RecallSamples(samples.__getitem__, lengths, tokenizer.pad)

    def fingerprint(self, split: str) -> str:
        """A checksum of the samples of a split; generated ones are told by their options."""
        if not self.embedded:
            return fingerprint(list(self.read(split)))
        options = self.generator()
        shown = options.model_dump(mode="json", exclude=set(SPLITS))
        return fingerprint([self.embedded, shown, split, getattr(options, split)])


def _all_symbols(options: RecallOptions) -> str:
    """The symbols of a generated set as a text, in their order."""
    return " ".join(map(str, range(options.vocab)))


def _asked(targets: Sequence[str]) -> list[str]:
    return [target for target in targets if target != NOT_ASKED]


def _encode(text: Sequence[str], targets: Sequence[str], tokenizer: Tokenizer) -> Sample:
    found = np.full(len(targets), tokenizer.pad)
    found[[target != NOT_ASKED for target in targets]] = tokenizer.encode(" ".join(_asked(targets)))
    return np.array(tokenizer.encode(" ".join(text))), found


class RecallSamples:
    """The samples of a split, and how they become batches."""

    def __init__(self, sample: Callable[[int], Sample], lengths: np.ndarray, pad: int) -> None:
        """sample: gives the sample of a number. lengths: (samples,), of each."""
        self.sample, self.pad = sample, pad
        self.sizes: tuple[np.ndarray, ...] = (lengths,)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        """inputs and targets (B, T); target_index (n,): see `target_index`.

        Targets are `pad` where nothing is asked, and after the end of a sample.
        """
        batch = collate_blocks([self.sample(int(number)) for number in numbers], self.pad)
        index = target_index(batch["targets"], self.pad)
        return {"inputs": batch["inputs"], "targets": batch["targets"], "target_index": index}

    def asked(self, most: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields inputs (T,), the positions that are asked (n,), and their targets (n,), of the first samples."""
        for number in range(len(self.sizes[0]))[:most]:
            inputs, targets = self.sample(number)
            (places,) = np.nonzero(targets != self.pad)
            yield inputs, places, targets[places]


def right_answers(model: LanguageModel, features: Tensor, targets: Tensor, pad: int) -> Tensor:
    """Whether the likeliest symbol is the target, (B, T) bool. features: (B, T, dim), what the model's head reads.

    It is False where nothing is asked. Logits are made in chunks of positions, never for all at once.
    """
    is_right = torch.zeros_like(targets, dtype=torch.bool).flatten()
    asked = (targets != pad).flatten().nonzero().squeeze(1)
    for places in asked.split(chunk_rows(model.config.vocab, asked.device)):
        logits = model.head(features.flatten(0, 1).index_select(0, places))
        is_right[places] = class_ranks(logits, targets.flatten()[places]) == 0
    return is_right.view(targets.shape)


@register_task
class RecallTask(Task):
    name = "recall"
    Data = RecallData
    model_kinds = ("language-model",)
    metric = "accuracy"
    better = "higher"
    main_metric = MainMetric("accuracy", "recall accuracy", "higher", accuracy_score, margin=1, scale=100, unit=" %")

    def __init__(self, data: RecallData, tokenizer: Tokenizer, smoothing: float = 0.0, aux_weight: float = 0.0) -> None:
        super().__init__(smoothing, aux_weight)
        self.tokenizer = tokenizer
        self.splits = {split: data.open_split(split, tokenizer) for split in data.splits or SPLITS}
        if data.embedded:
            self.answers = data.generator().answers
        else:
            train = self.splits["train"].asked()
            self.answers = len({int(answer) for _, _, answers in train for answer in answers})

    @classmethod
    def open(
        cls,
        data: RecallData,
        cache: Path,  # noqa: ARG003
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,  # noqa: ARG003
    ) -> Self:
        return cls(data, data.train_tokenizer(), smoothing, aux_weight)

    @property
    def split_names(self) -> Sequence[str]:
        return list(self.splits)

    def samples(self, split: str, training: bool) -> RecallSamples:  # noqa: ARG002
        check_split(split, self.splits)
        return self.splits[split]

    # ------------------------------------------------------------------ model

    def data_dependent_model_config(self) -> dict[str, Any]:
        tokenizer = self.tokenizer
        return {"vocab": tokenizer.size, "embedding": {"pad": tokenizer.pad}, "answers": self.answers}

    @classmethod
    def expected_model_config(cls, data: RecallData) -> dict[str, Any]:
        return {"vocab": data.train_tokenizer().size} if data.embedded else {}

    @classmethod
    def typical_batch(cls, data: RecallData, budget: Budget) -> tuple[int, int | None]:
        return typical_text_batch(budget, data.generator().length if data.embedded else TYPICAL_LENGTH)

    @classmethod
    def at_length(cls, data: RecallData, model: Mapping[str, Any], budget: Budget, length: int) -> dict[str, Any]:  # noqa: ARG003
        if not data.embedded:
            raise ValueError("samples of files have lengths of their own; generated sets have any length")
        return {"data.options.length": length}

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"text": self.tokenizer}

    # ------------------------------------------------------------------ loss

    @property
    def pad(self) -> int:
        return self.tokenizer.pad

    @classmethod
    def model_loss(
        cls, model: LanguageModel, batch: Mapping[str, Tensor], pad: int = -1, smoothing: float = 0.0
    ) -> tuple[LossOutput, Tensor | None]:
        """Validation also counts right answers; training spares the logits that this takes."""
        targets = batch["targets"]
        x, _, aux = model.features(batch["inputs"])
        found = word_loss(model.head, x, targets, pad=pad, smoothing=smoothing, index=batch.get("target_index"))
        if not torch.is_grad_enabled():
            found = replace(found, sums=found.sums | {"accuracy": right_answers(model, x, targets, pad).sum()})
        return found, mean_aux(aux)

    def logits(self, model: LanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["inputs"]).logits

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        model, tokenizer, config = run.model, run.tokenizer("text"), run.data
        assert isinstance(model, LanguageModel)
        assert isinstance(config, RecallData)

        def count_right(batch: dict[str, Tensor]) -> list[list[float]]:
            """[right answers, answers that were asked for] of every sample."""
            batch = to_device(batch, run.device)
            x, _, _ = model.features(batch["inputs"])
            is_right = right_answers(model, x, batch["targets"], tokenizer.pad)
            return torch.stack([is_right.sum(1), (batch["targets"] != tokenizer.pad).sum(1)], 1).tolist()

        samples = config.open_split(split, tokenizer)
        counts = shards.rows(samples, count_right, "samples scored", options.first)
        how = f"per:asked symbol|tokenizer:{tokenizer.fingerprint()[:12]}"
        asked = counts[counts[:, 1] > 0]  # a resample of samples that ask for nothing would have no accuracy
        measures = {"accuracy": Measure(asked, accuracy_score, how, percent=True)}
        data = {"sha256": config.fingerprint(split), "text": "generated" if config.embedded else "as given"}
        totals = {"asked": int(counts[:, 1].sum()), "tokens": int(samples.sizes[0][: len(counts)].sum())}
        return Evaluation(cls.name, split, len(counts), 0, measures, data, counts=totals)

    @classmethod
    def chance_level(cls, model_config: Mapping[str, Any], samples: int) -> float:
        """The accuracy of guessing an answer, and two of its standard deviations over the samples, in percent."""
        guess = 1 / model_config["answers"]
        return 100 * (guess + 2 * math.sqrt(guess * (1 - guess) / samples))

    def floors(self, data: RecallData, split: str) -> list[Floor]:  # noqa: ARG002
        """The most frequent answer, any answer that stands in the sample, and the most frequent one of a symbol."""
        size, counts = self.tokenizer.size, PairCounts(self.tokenizer.size)
        counted = min(COUNTED_SAMPLES, len(self.splits["train"].sizes[0]))
        for inputs, places, answers in self.splits["train"].asked(counted):
            counts.add(inputs[places], answers)
        symbols, words = np.divmod(counts.keys, size)
        totals = np.bincount(words, weights=counts.counts, minlength=size)
        frequent, order = np.full(size, totals.argmax()), np.argsort(counts.counts, kind="stable")
        frequent[symbols[order]] = words[order]  # of the answers of a symbol the last one stays, the most frequent
        hits, asked = np.zeros(3), 0
        for inputs, places, answers in self.splits[split].asked():
            hits[0] += (answers == totals.argmax()).sum()
            hits[1] += _chances_in_context(inputs, places, answers, totals > 0).sum()
            hits[2] += (answers == frequent[inputs[places]]).sum()
            asked += len(answers)
        where = f"in {counted:,} training samples"
        told: list[tuple[str, Any, str]] = [
            ("most frequent answer", "trivial", f"The most frequent answer {where}."),
            ("any answer in the sample", "trivial", "Any of the answers that were inputs before, drawn at random."),
            ("answer by symbol", "linear", f"The most frequent answer at each input symbol {where}."),
        ]
        values = self.main_metric.scale * hits / max(1, asked)
        return [
            Floor(name=name, kind=kind, value=float(value), how=how)
            for (name, kind, how), value in zip(told, values, strict=True)
        ]

    @classmethod
    def random_batch(
        cls, model: LanguageModel, batch: int, length: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        (tokens,) = model.random_inputs(batch, length, generator)
        targets = torch.full_like(tokens, -1)
        targets[:, ::RANDOM_TARGETS_EVERY] = tokens[:, ::RANDOM_TARGETS_EVERY]
        return {"inputs": tokens, "targets": targets, "target_index": target_index(targets, -1)}


def _chances_in_context(
    inputs: np.ndarray, places: np.ndarray, answers: np.ndarray, is_answer: np.ndarray
) -> np.ndarray:
    """The probability (n,) that a random draw of the answers among the inputs up to each place (n,) is right.

    is_answer: (vocab,), whether a symbol is ever an answer.
    """
    symbols, first = np.unique(inputs, return_index=True)
    first = np.where(is_answer[symbols], first, len(inputs))
    first_at = np.full(len(is_answer), len(inputs))
    first_at[symbols] = first
    seen = np.searchsorted(np.sort(first), places, side="right")
    return np.where(first_at[answers] <= places, 1 / np.maximum(1, seen), 0.0)
