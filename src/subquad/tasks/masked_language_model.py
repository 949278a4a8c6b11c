"""Masked language modelling: the masked tokens of a text, given all others, from text cut into blocks.

A sample is the symbol of a beginning and a block of tokens. Which of them are masked depends on the sample and on the
seed that the trainer gives its batch: training masks others in each epoch, validation and evaluation always the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.data.batches import Batch, to_device
from subquad.data.blocks import BlockOptions, Blocks, Lines, collate_blocks
from subquad.data.masking import Masking, MaskOptions
from subquad.data.text.prepare import ReportProgress
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import Tokenizer
from subquad.decode.limits import max_text_length
from subquad.evaluate.perplexity import TokenLines, perplexity, perplexity_score, sum_by_document
from subquad.evaluate.report import Evaluation
from subquad.models import MaskedLanguageModel
from subquad.models.base import mean_aux
from subquad.tasks.base import EvaluationOptions, Floor, MainMetric, TrainedModel, register_task
from subquad.tasks.losses import LossOutput, losses_by_row, target_index, word_loss
from subquad.tasks.sample_shards import SampleShards, fingerprint
from subquad.tasks.text import (
    BlockTask,
    TextData,
    counted_floors,
    cut_lines,
    drop_empty_padding,
    read_text,
    right_padding,
)

NUM_BEGINNING = 1
"""The number of tokens of a sample before its block."""
NUM_SPECIAL = NUM_BEGINNING + 1
"""The number of special tokens around a line: the beginning of the sample, and the end of the line."""
RANDOM_TARGETS_EVERY = 7
"""In a random batch every so many tokens are targets, about the share that training masks."""


class MaskedLanguageModelData(TextData):
    blocks: BlockOptions = Field(default_factory=BlockOptions, description="How text is cut into samples.")
    masking: MaskOptions = Field(default_factory=MaskOptions, description="Which tokens the model has to predict.")

    task = "masked-language-model"
    sample_kind = "text"
    embedded_kind = "text"


def beginning(tokenizer: Tokenizer) -> int:
    """The token that a sample begins with: bos, or eos for token ids from elsewhere that have no bos."""
    return tokenizer.bos if tokenizer.bos >= 0 else tokenizer.eos


class MaskedSamples:
    """Blocks of one store, with some of their tokens masked."""

    def __init__(self, store: Lines, blocks: BlockOptions, masking: MaskOptions, tokenizer: Tokenizer) -> None:
        if blocks.tokens_per_sample <= NUM_BEGINNING:
            raise ValueError(f"data.blocks.tokens_per_sample is {blocks.tokens_per_sample}; the beginning is one token")
        shorter = blocks.model_copy(update={"tokens_per_sample": blocks.tokens_per_sample - NUM_BEGINNING})
        self.blocks, self.tokenizer = Blocks(store, shorter, tokenizer.eos), tokenizer
        self.first = beginning(tokenizer)
        special = [tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk]
        words = np.setdiff1d(np.arange(tokenizer.size), special)
        self.masking = Masking(masking, tokenizer.size, words if len(words) else np.array([tokenizer.unk]))
        self.sizes: tuple[np.ndarray, ...] = (self.blocks.sizes + NUM_BEGINNING,)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        """inputs (B, T); targets (B, T): the tokens to predict, `pad` at all other positions; padding (B, T) if any.

        target_index (n,): see `target_index`.
        """
        batch = collate_blocks([self._sample(int(number), seed) for number in numbers], self.tokenizer.pad)
        return drop_empty_padding({**batch, "target_index": target_index(batch["targets"], self.tokenizer.pad)})

    def _sample(self, number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.blocks.stream(int(self.blocks.begin[number]), int(self.blocks.end[number]))
        read, asked = self.masking.apply(tokens, np.random.default_rng([seed, number]))
        targets = np.where(asked, tokens, self.tokenizer.pad)
        # The beginning is no word: it is neither masked nor a target.
        return np.append(self.first, read), np.append(self.tokenizer.pad, targets)

    def targets_between_neighbours(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All targets (n,), with the token that the model reads before and after each; at an end it is the mask."""
        parts = []
        for number in range(len(self.blocks)):
            read, targets = self._sample(number, 0)
            (places,) = np.nonzero(targets != self.tokenizer.pad)
            read = np.append(read, self.masking.mask_id)
            parts.append((read[places - 1], targets[places], read[places + 1]))
        left, words, right = (np.concatenate(side) for side in zip(*parts, strict=True))
        return left, words, right


def masked_losses_by_row(model: MaskedLanguageModel, batch: Mapping[str, Tensor], pad: int) -> list[list[float]]:
    """[summed nll, number of targets] of every sample of a batch."""
    x, _, _ = model.features(batch["inputs"], right_padding(batch.get("padding")))
    return losses_by_row(model.head, model.head_inputs(x), batch["targets"], pad=pad)


@register_task
class MaskedLanguageModelTask(BlockTask):
    name = "masked-language-model"
    Data = MaskedLanguageModelData
    model_kinds = ("masked-language-model",)
    main_metric = MainMetric(
        "ppl", "perplexity of masked words", "lower", perplexity_score, margin=0.02, relative_margin=True
    )
    extra_symbols = 1  # the mask

    def __init__(
        self,
        data: PreparedText,
        blocks: BlockOptions,
        masking: MaskOptions,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
    ) -> None:
        super().__init__(data, blocks, smoothing, aux_weight)
        self.masking = masking

    @classmethod
    def open(
        cls,
        data: MaskedLanguageModelData,
        cache: Path,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,
    ) -> Self:
        return cls(data.prepare_for_training(cache, report), data.blocks, data.masking, smoothing, aux_weight)

    def samples(self, split: str, training: bool) -> MaskedSamples:  # noqa: ARG002
        return MaskedSamples(self.data.store(split, "text"), self.blocks, self.masking, self.tokenizer)

    # ------------------------------------------------------------------ loss

    @classmethod
    def model_loss(
        cls, model: MaskedLanguageModel, batch: Mapping[str, Tensor], pad: int = -1, smoothing: float = 0.0
    ) -> tuple[LossOutput, Tensor | None]:
        targets = batch["targets"]
        x, _, aux = model.features(batch["inputs"], right_padding(batch.get("padding")))
        asked = batch.get("target_index")
        asked = target_index(targets, pad) if asked is None else asked
        words = model.head_inputs(x.flatten(0, 1).index_select(0, asked))  # other positions need no logits
        found = word_loss(model.head, words, targets.flatten().index_select(0, asked), pad=-1, smoothing=smoothing)
        return found, mean_aux(aux)

    def logits(self, model: MaskedLanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["inputs"], padding=right_padding(batch.get("padding"))).logits

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        model, tokenizer, config = run.model, run.tokenizer("text"), run.data
        assert isinstance(model, MaskedLanguageModel)
        assert isinstance(config, MaskedLanguageModelData)
        texts, origin = read_text(run, split, options.first)
        lines = tokenizer.encode_batch([line for (line,) in texts])
        if config.blocks.breaks != "none":  # lines stay whole, so what the model cannot read is cut
            lines = cut_lines(lines, max_text_length(model), NUM_SPECIAL)
        samples = MaskedSamples(TokenLines(lines), config.blocks, config.masking, tokenizer)
        losses = shards.rows(
            samples,
            lambda batch: masked_losses_by_row(model, to_device(batch, run.device), tokenizer.pad),
            "pieces of text scored",
        )
        losses = sum_by_document(losses, samples.blocks)
        masking = config.masking
        how = f"masked:{masking.share:g}, {masking.kept:g} kept, {masking.random:g} random"
        how += f"|sample:{config.blocks.tokens_per_sample}|breaks:{config.blocks.breaks}"
        how += f"|tokenizer:{tokenizer.fingerprint()[:12]}"
        measures = {"ppl": perplexity(losses, signature=f"per:masked token|{how}")}
        counts = {"masked tokens": int(losses[:, 1].sum()), "tokens": samples.blocks.total, "documents": len(losses)}
        settings = {"masking": masking.model_dump(mode="json"), **config.blocks.model_dump(mode="json")}
        data = {"sha256": fingerprint(texts), "text": origin}
        return Evaluation(cls.name, split, len(texts), 0, measures, data, settings, counts)

    def floors(self, data: MaskedLanguageModelData, split: str) -> list[Floor]:
        """Lines that are longer than a model can read are not cut here."""
        counts = self.count_pairs()
        samples = MaskedSamples(self.evaluated_lines(data, split), data.blocks, data.masking, self.tokenizer)
        left, words, right = samples.targets_between_neighbours()
        unigram = counts.unigram().log_probs(words)
        mask = samples.masking.mask_id
        by_neighbour = [
            np.where(neighbour == mask, unigram, model.log_probs(neighbour, words))
            for neighbour, model in ((left, counts.bigram()), (right, counts.reversed_bigram()))
        ]
        how = (
            "The mean of two Kneser-Ney bigrams, one of the word before and one of the word after, counted in the "
            "training text; the unigram where that neighbour is masked."
        )
        mean = np.logaddexp(*by_neighbour) - np.log(2)
        return counted_floors(counts, unigram, "neighbouring words", mean, how)

    @classmethod
    def random_batch(
        cls, model: MaskedLanguageModel, batch: int, length: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        (tokens,) = model.random_inputs(batch, length, generator)
        targets = torch.full_like(tokens, -1)
        targets[:, ::RANDOM_TARGETS_EVERY] = tokens[:, ::RANDOM_TARGETS_EVERY]
        return {"inputs": tokens, "targets": targets, "target_index": target_index(targets, -1)}
