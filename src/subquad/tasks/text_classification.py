"""Text classification: a class for each text.

A sample is eos and the tokens of a text, as texts begin in language models; a model with `pooling: first` classifies
that first token. Labels are names; the classes are those of the training texts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.data.batches import Batch, Budget, collate_texts, to_device
from subquad.data.blocks import Lines
from subquad.data.text.prepare import ReportProgress
from subquad.data.text.stats import token_counts
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.simple import LabelTokenizer
from subquad.decode.classify import TextLabeller
from subquad.decode.limits import max_text_length
from subquad.evaluate.accuracy import class_ranks
from subquad.evaluate.linear_probe import MAX_FEATURES
from subquad.evaluate.perplexity import TokenLines
from subquad.evaluate.report import Evaluation
from subquad.models import TextClassifier
from subquad.tasks.base import EvaluationOptions, Floor, TrainedModel, register_task
from subquad.tasks.classification import (
    PROBE_SAMPLES,
    SCORED_SAMPLES,
    ClassificationTask,
    Features,
    accuracies,
    class_floors,
    class_loss_and_hits,
    evenly_spaced,
)
from subquad.tasks.losses import LossOutput
from subquad.tasks.sample_shards import SampleShards, fingerprint
from subquad.tasks.text import (
    TextData,
    TextTask,
    drop_empty_padding,
    read_text,
    right_padding,
    text_of_split,
    typical_text_batch,
)

WITH_EOS = 1
TYPICAL_LENGTH = 512
"""The assumed tokens of a text, for an estimate of memory, if the recipe does not limit them."""


class TextClassificationData(TextData):
    """Where labelled texts come from.

    They are an embedded set, a folder that `subquad data prepare --samples labelled` wrote, tables with a label and a
    text in each row, or a folder with a folder for each class and a file for each text.
    """

    long_texts: Literal["skip", "cut"] = Field(
        "skip",
        description="What happens to texts of more than max_length tokens: they are skipped in training, or cut to "
        "their first max_length tokens, in training, evaluation and use. How many there are is printed.",
    )

    task = "text-classification"
    sample_kind = "labelled"
    embedded_kind = "labelled"

    def check(self) -> None:
        super().check()
        if self.fairseq is not None:
            raise ValueError("a folder of fairseq-preprocess has no labels; give embedded, folder or splits")
        if self.long_texts == "cut" and self.max_length is None:
            raise ValueError("long_texts: cut needs max_length, the number of tokens that are kept")

    @property
    def longest(self) -> int | None:
        return None if self.long_texts == "cut" else self.max_length

    @property
    def cut_to(self) -> int | None:
        """How many tokens are kept of a longer text; None: all of them."""
        return self.max_length if self.long_texts == "cut" else None

    def example(self, split: str) -> str:
        return f"data.splits.{split}=FILE_OR_FOLDER"


class LabelledTexts:
    """Texts with labels (n,), each cut to its first `most` tokens; None: whole."""

    def __init__(self, labels: np.ndarray, texts: Lines, tokenizer: Tokenizer, most: int | None) -> None:
        self.labels, self.texts, self.most = np.asarray(labels, np.int64), texts, most
        self.pad, self.eos = tokenizer.pad, tokenizer.eos
        lengths = np.asarray(texts.lengths, np.int64)
        self.num_cut = 0 if most is None else int((lengths > most).sum())
        self.sizes: tuple[np.ndarray, ...] = ((lengths if most is None else np.minimum(lengths, most)) + WITH_EOS,)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        """tokens (B, T); padding (B, T) if any; labels (B,)."""
        batch = collate_texts([self.tokens(int(number)) for number in numbers], self.pad, self.eos)
        return {**drop_empty_padding(batch), "labels": torch.from_numpy(self.labels[numbers])}

    def tokens(self, number: int) -> np.ndarray:
        return self.texts[number][: self.most]

    def log_counts(self, most: int, tokens: np.ndarray) -> Features:
        """The linear probe's inputs of up to `most` texts, evenly spaced: log(1 + count) of each of these tokens."""
        numbers = evenly_spaced(len(self), most)
        counts = np.zeros((len(numbers), len(tokens)), np.float32)
        for row, number in enumerate(numbers):
            found = np.bincount(self.tokens(int(number)), minlength=int(tokens.max()) + 1)
            counts[row] = found[tokens]
        return torch.from_numpy(np.log1p(counts, out=counts)), torch.from_numpy(self.labels[numbers])


@register_task
class TextClassificationTask(ClassificationTask, TextTask):
    name = "text-classification"
    target_unit = "texts"
    Data = TextClassificationData
    model_kinds = ("text-classifier",)

    def __init__(
        self, data: PreparedText, cut_to: int | None = None, smoothing: float = 0.0, aux_weight: float = 0.0
    ) -> None:
        """cut_to: how many tokens are kept of longer texts; None: all of them."""
        super().__init__(data, smoothing, aux_weight)
        labels = data.tokenizer("label")
        assert isinstance(labels, LabelTokenizer)
        if labels.size < 2:
            raise ValueError(f"all training texts have the label {labels.names[0]!r}; a classifier needs two classes")
        self.labels, self.tokenizer, self.cut_to = labels, data.tokenizer("text"), cut_to

    @classmethod
    def open(
        cls,
        data: TextClassificationData,
        cache: Path,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,
    ) -> Self:
        return cls(data.prepare_for_training(cache, report), data.cut_to, smoothing, aux_weight)

    def samples(self, split: str, training: bool) -> LabelledTexts:  # noqa: ARG002
        labels = self.data.store(split, "label").tokens  # one for each text
        return LabelledTexts(labels, self.data.store(split, "text"), self.tokenizer, self.cut_to)

    def notes(self) -> dict[str, str]:
        notes = super().notes()
        for split in self.split_names:
            samples = self.samples(split, training=False)
            if samples.num_cut:
                cut = f"{samples.num_cut:,} of {len(samples):,} texts cut to their first {self.cut_to:,} tokens"
                notes[split] = f"{notes[split]}; {cut}" if split in notes else cut
        return notes

    # ------------------------------------------------------------------ model

    def data_dependent_model_config(self) -> dict[str, Any]:
        size, pad = self.tokenizer.size, self.tokenizer.pad
        return {"vocab": size, "num_classes": self.labels.size, "embedding": {"pad": pad}}

    @classmethod
    def expected_model_config(cls, data: TextClassificationData) -> dict[str, Any]:
        size = data.tokenizer.vocab_size
        return {} if size is None else {"vocab": size}

    @classmethod
    def typical_batch(cls, data: TextClassificationData, budget: Budget) -> tuple[int, int | None]:
        generated = data.options.get("max_length") if data.embedded else None
        return typical_text_batch(budget, data.max_length or generated or TYPICAL_LENGTH)

    @classmethod
    def at_length(
        cls,
        data: TextClassificationData,
        model: Mapping[str, Any],  # noqa: ARG003
        budget: Budget,  # noqa: ARG003
        length: int,
    ) -> dict[str, Any]:
        """Texts are cut to the length; expressions of ListOps are made for it, from a quarter of it on as in LRA."""
        if data.embedded == "listops":
            return {"data.options.min_length": length // 4, "data.options.max_length": length}
        return {"data.max_length": length, "data.long_texts": "cut"}

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"text": self.tokenizer}

    def inputs(self) -> dict[str, Any]:
        return {"classes": self.labels.names}

    # ------------------------------------------------------------------ loss

    @classmethod
    def model_loss(
        cls,
        model: TextClassifier,
        batch: Mapping[str, Tensor],
        pad: int = -1,  # noqa: ARG003
        smoothing: float = 0.0,
    ) -> tuple[LossOutput, Tensor | None]:
        logits, _, aux = model(batch["tokens"], padding=right_padding(batch.get("padding")))
        return class_loss_and_hits(logits, batch, smoothing), aux

    def logits(self, model: TextClassifier, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["tokens"], padding=right_padding(batch.get("padding"))).logits

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"]

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        """Every text of the split counts: those that training skips as too long too, as far as the model can read."""
        model, config, classes = run.model, run.data, run.inputs["classes"]
        assert isinstance(model, TextClassifier)
        assert isinstance(config, TextClassificationData)
        texts, origin = read_text(run, split, options.first)
        most = max_tokens(model, config)
        samples = _encode_labelled(texts, run.tokenizer("text"), LabelTokenizer(classes), most)

        def ranks(batch: dict[str, Tensor]) -> list[list[float]]:
            batch = to_device(batch, run.device)
            logits = model(batch["tokens"], padding=right_padding(batch.get("padding"))).logits
            return [[rank] for rank in class_ranks(logits, batch["labels"]).tolist()]

        found = shards.rows(samples, ranks, "batches of texts classified")
        counts = {"tokens": int(samples.sizes[0].sum()), "cut": samples.num_cut}
        data, settings = {"sha256": fingerprint(texts), "text": origin}, {"max_tokens": most}
        return Evaluation(cls.name, split, len(texts), 0, accuracies(found[:, 0], len(classes)), data, settings, counts)

    def floors(self, data: TextClassificationData, split: str) -> list[Floor]:
        """Texts are whole here, or cut as the recipe says, also where a model reads less."""
        texts, _ = text_of_split(data, self.data.folder, split)
        evaluated = _encode_labelled(texts, self.tokenizer, self.labels, self.cut_to)
        counts = token_counts(self.data.store("train", "text"), self.tokenizer.size)
        frequent = np.argsort(-counts, kind="stable")[:MAX_FEATURES]
        train, valid = (self.samples(name, training=False) for name in ("train", "valid"))
        return class_floors(
            train.log_counts(PROBE_SAMPLES, frequent),
            valid.log_counts(SCORED_SAMPLES, frequent),
            evaluated.log_counts(SCORED_SAMPLES, frequent),
            self.labels.size,
            f"texts of {split}",
            f"the counts of {len(frequent):,} tokens, as log(1 + count),",
        )

    @classmethod
    def classifier(cls, run: TrainedModel) -> TextLabeller:
        assert isinstance(run.model, TextClassifier)
        assert isinstance(run.data, TextClassificationData)
        most = max_tokens(run.model, run.data)
        return TextLabeller(run.model, run.tokenizer("text"), run.inputs["classes"], most)

    @classmethod
    def random_batch(
        cls, model: TextClassifier, batch: int, length: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        (tokens,) = model.random_inputs(batch, length, generator)
        labels = torch.randint(model.config.num_classes, (batch,), generator=generator, device=generator.device)
        return {"tokens": tokens, "labels": labels}


def max_tokens(model: TextClassifier, data: TextClassificationData) -> int | None:
    """How many tokens of a text a model gets, eos not counted: what the recipe cuts to, or what the model can read."""
    limit = max_text_length(model)
    limits = [data.cut_to, None if limit is None else limit - WITH_EOS]
    return min((most for most in limits if most is not None), default=None)


def _encode_labelled(
    texts: list[tuple[str, ...]], tokenizer: Tokenizer, labels: LabelTokenizer, most: int | None
) -> LabelledTexts:
    """Samples (label, text) as evaluation reads them."""
    lines = TokenLines(tokenizer.encode_batch([text for _, text in texts]))
    return LabelledTexts(np.array([labels.encode(label)[0] for label, _ in texts]), lines, tokenizer, most)
