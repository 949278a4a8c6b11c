"""Translation: the target's words given the source, from parallel text."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Choices
from subquad.data.batches import Batch, Budget, collate_pairs, to_device
from subquad.data.blocks import Lines
from subquad.data.text.prepare import ReportProgress
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import RUN, Tokenizer, TokenizerConfig
from subquad.data.tokenizers.fairseq import post_process
from subquad.decode.limits import max_source_length, max_text_length
from subquad.decode.translate import Translator
from subquad.evaluate.bleu_and_chrf import bleu, bleu_score, chrf, compound_bleu, word_bleu, word_splitter
from subquad.evaluate.measure import Measure
from subquad.evaluate.perplexity import TokenLines, perplexity
from subquad.evaluate.report import Evaluation
from subquad.models import Seq2Seq
from subquad.models.base import mean_aux
from subquad.tasks.base import EvaluationOptions, Floor, MainMetric, TrainedModel, register_task
from subquad.tasks.losses import LossOutput, losses_by_row, target_entries, word_loss
from subquad.tasks.sample_shards import SampleShards, fingerprint
from subquad.tasks.text import (
    TextData,
    WordTask,
    cut_lines,
    read_text,
    right_padding,
    saved_tokenizer,
    text_of_split,
    typical_text_batch,
)

WITH_EOS = 1
TYPICAL_LENGTH = 64
"""The assumed tokens of a sentence, for an estimate of memory before the data is read."""
TIMED_LINES = 32
"""The number of lines that the speed of decoding is measured with."""
COUNTED_TARGETS = 200_000
"""Training targets among which the most frequent one is looked for."""


class TranslationData(TextData):
    target_tokenizer: TokenizerConfig | None = Field(None, description="A separate tokenizer for the target, or null.")

    task = "translation"
    sample_kind = "pairs"
    embedded_kind = "pairs"

    def tokenizer_configs(self) -> dict[str, TokenizerConfig]:
        target = {} if self.target_tokenizer is None else {"target_tokenizer": self.target_tokenizer}
        return {"tokenizer": self.tokenizer, **target}

    def check(self) -> None:
        super().check()
        if self.tokenizer.kind == RUN and self.target_tokenizer is not None:
            raise ValueError("tokenizer of kind run stands for source and target; leave target_tokenizer out")

    def with_run_tokenizers(self) -> Self:
        return super().with_run_tokenizers().model_copy(update={"target_tokenizer": None})

    def in_run(self, run: Path) -> Self:
        if self.tokenizer.kind != RUN:
            return self
        sides = {"tokenizer": saved_tokenizer(run, "source"), "target_tokenizer": saved_tokenizer(run, "target")}
        return self.model_copy(update=sides)

    def example(self, split: str) -> str:
        return f"data.splits.{split}=[SOURCE, TARGET]"


class Pairs:
    """Sentence pairs of two stores."""

    def __init__(self, source: Lines, target: Lines, pad: int, eos: int) -> None:
        self.source, self.target, self.pad, self.eos = source, target, pad, eos
        self.sizes: tuple[np.ndarray, ...] = (source.lengths + WITH_EOS, target.lengths + WITH_EOS)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        """source, source_padding (B, S); target_in, target_out (B, T), with their `target_entries`."""
        batch = collate_pairs([(self.source[int(i)], self.target[int(i)]) for i in numbers], self.pad, self.eos)
        return {**batch, **target_entries(batch["target_out"], self.pad)}


def target_features(model: Seq2Seq, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What the head reads at each target position, (B, T, dim), and the mixers' regulariser."""
    padding = right_padding(batch.get("source_padding"))
    context, _, encoder_aux = model.encode(batch["source"], padding)
    # The decoder is causal: what follows a sentence's end reaches nothing that counts, so it needs no padding.
    x, _, decoder_aux = model.features(batch["target_in"], context, context_padding=padding)
    return x, mean_aux(encoder_aux, decoder_aux)


def pair_losses_by_row(model: Seq2Seq, batch: Mapping[str, Tensor], pad: int) -> list[list[float]]:
    """[summed nll, number of targets] of every sentence of a batch."""
    x, _ = target_features(model, batch)
    return losses_by_row(model.head, x, batch["target_out"], pad=pad)


@register_task
class TranslationTask(WordTask):
    name = "translation"
    Data = TranslationData
    model_kinds = ("encoder-decoder",)
    main_metric = MainMetric("bleu", "BLEU", "higher", bleu_score, margin=0.5)
    tuned: ClassVar = {"model.*.norm": Choices(("pre", "post"))}  # short trainings with post-norm may learn nothing
    decodes = True
    evaluation_passes = 2

    def __init__(self, data: PreparedText, smoothing: float = 0.0, aux_weight: float = 0.0) -> None:
        super().__init__(data, smoothing, aux_weight)
        self.source, self.target = data.tokenizer("source"), data.tokenizer("target")
        if (self.source.pad, self.source.eos) != (self.target.pad, self.target.eos):
            raise ValueError("the two tokenizers number padding and end of sentence differently; train them together")

    @classmethod
    def open(
        cls,
        data: TranslationData,
        cache: Path,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,
    ) -> Self:
        return cls(data.prepare_for_training(cache, report), smoothing, aux_weight)

    def samples(self, split: str, training: bool) -> Pairs:  # noqa: ARG002
        source, target = self.data.store(split, "source"), self.data.store(split, "target")
        return Pairs(source, target, self.target.pad, self.target.eos)

    # ------------------------------------------------------------------ model

    def data_dependent_model_config(self) -> dict[str, Any]:
        return {
            "source_vocab": self.source.size,
            "target_vocab": self.target.size,
            "source": {"pad": self.source.pad},
            "target": {"pad": self.target.pad},
        }

    @classmethod
    def expected_model_config(cls, data: TranslationData) -> dict[str, Any]:
        if counted := data.count_vocabularies():
            return {"source_vocab": counted[0], "target_vocab": counted[-1]}
        source = data.tokenizer.vocab_size
        target = data.target_tokenizer.vocab_size if data.target_tokenizer is not None else source
        return {} if source is None or target is None else {"source_vocab": source, "target_vocab": target}

    @classmethod
    def typical_batch(cls, data: TranslationData, budget: Budget) -> tuple[int, int | None]:  # noqa: ARG003
        return typical_text_batch(budget, TYPICAL_LENGTH)

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"source": self.source, "target": self.target}

    # ------------------------------------------------------------------ loss

    @property
    def pad(self) -> int:
        return self.target.pad

    @classmethod
    def model_loss(
        cls, model: Seq2Seq, batch: Mapping[str, Tensor], pad: int = -1, smoothing: float = 0.0
    ) -> tuple[LossOutput, Tensor | None]:
        x, aux = target_features(model, batch)
        given = {"index": batch.get("target_index"), "words": batch.get("target_words")}
        return word_loss(model.head, x, batch["target_out"], pad=pad, smoothing=smoothing, **given), aux

    def logits(self, model: Seq2Seq, batch: Mapping[str, Tensor]) -> Tensor:
        padding = right_padding(batch.get("source_padding"))
        return model(batch["source"], batch["target_in"], source_padding=padding).logits

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["target_out"]

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        model, target = run.model, run.tokenizer("target")
        assert isinstance(model, Seq2Seq)
        pairs, origin = read_text(run, split, options.first)
        sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        hypotheses, counts, lost = _translate(run, sources, shards)
        expected = [post_process(text, run.decode.remove_bpe) for text in references]
        name, words = word_splitter(target)
        tokenised = [words(text) for text in hypotheses], [words(text) for text in expected]
        measures = {
            "bleu": bleu(hypotheses, expected),
            "chrf": chrf(hypotheses, expected),
            "tokenised_bleu": _signed(word_bleu(*tokenised), f"|words:{name}"),
            "compound_bleu": _signed(compound_bleu(*tokenised), f"|words:{name}"),
        }
        inputs = cut_lines(run.tokenizer("source").encode_batch(sources), max_source_length(model))
        outputs = cut_lines(target.encode_batch(references), max_text_length(model))
        losses = shards.rows(
            Pairs(TokenLines(inputs), TokenLines(outputs), target.pad, target.eos),
            lambda batch: pair_losses_by_row(model, to_device(batch, run.device), target.pad),
            "references scored",
        )
        signature = f"tokens:target, ends counted|tokenizer:{target.fingerprint()[:12]}"
        measures["ppl"] = perplexity(losses, signature=signature)
        counts = {"tokens": int(losses[:, 1].sum()), **counts}
        settings = {"decode": run.decode.model_dump(mode="json")}
        data = {"sha256": fingerprint(pairs), "text": origin}
        return Evaluation(cls.name, split, len(pairs), lost, measures, data, settings, counts, hypotheses)

    @classmethod
    def chance_level(cls, model_config: Mapping[str, Any], samples: int) -> float:  # noqa: ARG003
        """A BLEU of 1, which a model can reach by frequent words alone."""
        return 1.0

    def floors(self, data: TranslationData, split: str) -> list[Floor]:
        pairs, _ = text_of_split(data, self.data.folder, split)
        sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        store = self.data.store("train", "target")
        lines = min(len(store), COUNTED_TARGETS)
        # of equally frequent ones the first, so that the floor is always the same
        ((most_frequent, _),) = Counter(store[number].tobytes() for number in range(lines)).most_common(1)
        constant = self.target.decode(np.frombuffer(most_frequent, store.tokens.dtype))
        return [
            Floor(
                name="copying the source",
                kind="trivial",
                value=bleu(sources, references).value,
                how="Every source is its own translation.",
            ),
            Floor(
                name="most frequent target",
                kind="trivial",
                value=bleu([constant] * len(references), references).value,
                how=f"Every translation is the most frequent one among the first {lines:,} of training.",
            ),
        ]

    @classmethod
    def random_batch(cls, model: Seq2Seq, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        source, target = model.random_inputs(batch, length, generator)
        return {"source": source, "target_in": target, "target_out": target}

    @classmethod
    def decoding_workload(cls, run: TrainedModel, split: str) -> Callable[[], int]:
        """Translates the first lines of the split with the recipe's beam."""
        model = run.model
        assert isinstance(model, Seq2Seq)
        sources = [source for source, _ in read_text(run, split, TIMED_LINES)[0]]
        translator = Translator([model], run.tokenizer("source"), run.tokenizer("target"), run.decode)
        return lambda: sum(
            len(result.candidates[0].log_probabilities) for result in translator.translate_window(sources)
        )


def _translate(run: TrainedModel, sources: list[str], shards: SampleShards) -> tuple[list[str], dict[str, int], int]:
    """The translation of every source, how many were empty or truncated, and how many are lost."""
    assert isinstance(run.model, Seq2Seq)
    translator = Translator([run.model], run.tokenizer("source"), run.tokenizer("target"), run.decode)
    own = shards.own(len(sources))
    results = translator.translate(sources[number] for number in own)
    numbered = zip(shards.steps(own, "lines translated"), results, strict=False)  # what is missing is counted below
    everything = shards.gather({number: result.text for number, result in numbered})
    counts = {"empty": shards.sum(translator.empty), "truncated": shards.sum(translator.truncated)}
    return [everything.get(number, "") for number in range(len(sources))], counts, len(sources) - len(everything)


def _signed(measure: Measure, more: str) -> Measure:
    return Measure(measure.statistics, measure.score, measure.signature + more, measure.better)
