"""Language modelling: every token given those before it, from text cut into blocks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.data.batches import Batch, to_device
from subquad.data.blocks import BlockOptions, Blocks, collate_blocks
from subquad.data.text.prepare import ReportProgress
from subquad.data.tokenizers.simple import IdTokenizer
from subquad.decode.generate import Generator
from subquad.decode.options import SampleOptions
from subquad.evaluate.by_position import mean_losses, position_buckets
from subquad.evaluate.perplexity import (
    ContextBlocks,
    TextSize,
    TokenLines,
    bits_per_unit,
    perplexity,
    perplexity_score,
    sum_by_document,
)
from subquad.evaluate.report import Evaluation
from subquad.models import LanguageModel
from subquad.models.base import mean_aux
from subquad.tasks.base import EvaluationOptions, Floor, MainMetric, TrainedModel, register_task
from subquad.tasks.losses import LossOutput, losses_by_position, target_entries, word_loss
from subquad.tasks.sample_shards import SampleShards, fingerprint
from subquad.tasks.text import BlockTask, TextData, counted_floors, read_text

TIMED_LINES, PROMPTS, PROMPT_WORDS, NEW_TOKENS = 32, 8, 8, 64
"""What the speed of decoding is measured with: prompts of words of the first lines, and tokens after each."""


class LanguageModelData(TextData):
    blocks: BlockOptions = Field(default_factory=BlockOptions, description="How text is cut into samples.")

    task = "language-model"
    sample_kind = "text"
    embedded_kind = "text"


class BlockSamples:
    """Blocks of one store."""

    def __init__(self, blocks: Blocks, pad: int) -> None:
        self.blocks, self.pad = blocks, pad
        self.sizes: tuple[np.ndarray, ...] = (blocks.sizes,)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        """inputs and targets (B, T), with their `target_entries`."""
        batch = collate_blocks([self.blocks[int(i)] for i in numbers], self.pad)
        entries = target_entries(batch["targets"], self.pad)
        return {"inputs": batch["inputs"], "targets": batch["targets"], **entries}


def block_losses(
    model: LanguageModel, batch: Mapping[str, Tensor], buckets: Sequence[slice], pad: int
) -> list[list[float]]:
    """[summed nll, number of targets] of every block of a batch, for one bucket of positions after the other.

    batch: of `ContextBlocks`. Targets that are padding do not count.
    """
    rows = list(zip(batch["start"].tolist(), batch["context"].tolist(), strict=True))
    x, _, _ = model.features(batch["inputs"], start=batch["start"] if any(start for start, _ in rows) else None)
    return losses_by_position(model.head, x, batch["targets"], buckets, rows, pad=pad)


@register_task
class LanguageModelTask(BlockTask):
    name = "language-model"
    Data = LanguageModelData
    model_kinds = ("language-model",)
    main_metric = MainMetric("ppl", "perplexity", "lower", perplexity_score, margin=0.02, relative_margin=True)
    decodes = True
    reads_context = True

    @classmethod
    def open(
        cls,
        data: LanguageModelData,
        cache: Path,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,
    ) -> Self:
        return cls(data.prepare_for_training(cache, report), data.blocks, smoothing, aux_weight)

    def samples(self, split: str, training: bool) -> BlockSamples:  # noqa: ARG002
        blocks = Blocks(self.data.store(split, "text"), self.blocks, self.tokenizer.eos)
        return BlockSamples(blocks, self.tokenizer.pad)

    # ------------------------------------------------------------------ loss

    @classmethod
    def model_loss(
        cls, model: LanguageModel, batch: Mapping[str, Tensor], pad: int = -1, smoothing: float = 0.0
    ) -> tuple[LossOutput, Tensor | None]:
        # Blocks are padded after their end, where a causal model shows nothing to the tokens before.
        x, _, aux = model.features(batch["inputs"])
        given = {"index": batch.get("target_index"), "words": batch.get("target_words")}
        return word_loss(model.head, x, batch["targets"], pad=pad, smoothing=smoothing, **given), mean_aux(aux)

    def logits(self, model: LanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["inputs"]).logits

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        model, tokenizer, config, context = run.model, run.tokenizer("text"), run.data, options.context_window
        assert isinstance(model, LanguageModel)
        assert isinstance(config, LanguageModelData)
        samples, origin = read_text(run, split, options.first)
        lines = [line for (line,) in samples]
        store = TokenLines(tokenizer.encode_batch(lines))
        blocks = ContextBlocks(store, config.blocks, context, tokenizer.pad, tokenizer.eos, model.decoder.reads_from)
        buckets = position_buckets(blocks.longest)
        found = shards.rows(
            blocks,
            lambda batch: block_losses(model, to_device(batch, run.device), buckets, tokenizer.pad),
            "pieces of text scored",
        ).reshape(-1, len(buckets), 2)
        losses = sum_by_document(found.sum(1), blocks.blocks)
        tokens = int(losses[:, 1].sum())
        how = f"|context:{context}|sample:{config.blocks.tokens_per_sample}|breaks:{config.blocks.breaks}"
        how += f"|tokenizer:{tokenizer.fingerprint()[:12]}"
        measures = {"ppl": perplexity(losses, signature=f"per:token, line ends counted{how}")}
        counts = {"tokens": tokens, "documents": len(losses)}
        if not isinstance(tokenizer, IdTokenizer):  # numbers have no words
            size = TextSize.of(lines)
            counts |= {"words": size.words, "bytes": size.bytes}
            word, byte = f"per:whitespace word, line ends counted{how}", f"per:UTF-8 byte, line ends counted{how}"
            measures["word_ppl"] = perplexity(losses, size.words / tokens, word)
            measures["bits_per_byte"] = bits_per_unit(losses, size.bytes / tokens, byte)
        settings = {"context_window": context, **config.blocks.model_dump(mode="json")}
        data = {"sha256": fingerprint(samples), "text": origin}
        lost = blocks.blocks.total - tokens
        return Evaluation(
            cls.name,
            split,
            len(lines),
            lost,
            measures,
            data,
            settings,
            counts,
            loss_by_position=mean_losses(found.sum(0), buckets),
        )

    def floors(self, data: LanguageModelData, split: str) -> list[Floor]:
        counts = self.count_pairs()
        blocks = Blocks(self.evaluated_lines(data, split), self.blocks, self.tokenizer.eos)
        before, words = blocks.window(0, blocks.total)
        unigram, bigram = counts.unigram().log_probs(words), counts.bigram().log_probs(before, words)
        how = "Pairs of neighbours counted in the training text, with interpolated Kneser-Ney smoothing."
        return counted_floors(counts, unigram, "bigram", bigram, how)

    @classmethod
    def random_batch(
        cls, model: LanguageModel, batch: int, length: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        (tokens,) = model.random_inputs(batch, length, generator)
        return {"inputs": tokens, "targets": tokens}

    @classmethod
    def decoding_workload(cls, run: TrainedModel, split: str) -> Callable[[], int]:
        """Continues the beginnings of the split's first lines with the likeliest tokens."""
        model = run.model
        assert isinstance(model, LanguageModel)
        lines = [line for (line,) in read_text(run, split, TIMED_LINES)[0]]
        generator = Generator([model], run.tokenizer("text"), run.decode)
        prompts = [" ".join(line.split()[:PROMPT_WORDS]) for line in lines if line.strip()][:PROMPTS] or ["."]
        new = NEW_TOKENS if generator.max_tokens is None else max(1, min(NEW_TOKENS, generator.max_tokens // 2))
        greedy = SampleOptions(temperature=0)
        return lambda: sum(len(text.log_probabilities) for text in generator.sample(prompts, new, greedy))
