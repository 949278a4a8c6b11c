"""Translation: the target's words given the source, from prepared parallel text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from subquad.data.batches import Batch, Budget, collate_pairs
from subquad.data.blocks import Lines
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import Tokenizer
from subquad.models import Model, Seq2Seq
from subquad.models.base import mean_aux
from subquad.tasks.base import StepLoss, Task, with_perplexity
from subquad.tasks.losses import losses_by_row, word_loss

WITH_EOS = 1


class Pairs:
    """Sentence pairs of two stores."""

    def __init__(self, source: Lines, target: Lines, pad: int, eos: int) -> None:
        self.source, self.target, self.pad, self.eos = source, target, pad, eos
        self.sizes: tuple[np.ndarray, ...] = (source.lengths + WITH_EOS, target.lengths + WITH_EOS)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        return collate_pairs([(self.source[int(i)], self.target[int(i)]) for i in numbers], self.pad, self.eos)


def target_features(model: Seq2Seq, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What the head reads at each target position, (B, T, dim), and the mixers' regulariser."""
    padding = batch["source_padding"]
    context, _, encoder_aux = model.encode(batch["source"], padding)
    # The decoder is causal: what follows a sentence's end reaches nothing that counts, so it needs no padding.
    x, _, decoder_aux = model.features(batch["target_in"], context, context_padding=padding)
    return x, mean_aux(encoder_aux, decoder_aux)


def pair_losses(model: Seq2Seq, batch: Mapping[str, Tensor], pad: int) -> list[list[float]]:
    """[summed nll, number of targets] of every sentence of a batch."""
    x, _ = target_features(model, batch)
    return losses_by_row(model.head, x, batch["target_out"], pad=pad)


class TranslationTask(Task):
    name = "translation"

    def __init__(self, data: PreparedText, smoothing: float, aux_weight: float) -> None:
        super().__init__(smoothing, aux_weight)
        self.data = data
        self.source, self.target = data.tokenizer("source"), data.tokenizer("target")
        if (self.source.pad, self.source.eos) != (self.target.pad, self.target.eos):
            raise ValueError("the two tokenizers number padding and end of sentence differently; train them together")

    def samples(self, split: str, training: bool) -> Pairs:  # noqa: ARG002
        source, target = self.data.store(split, "source"), self.data.store(split, "target")
        return Pairs(source, target, self.target.pad, self.target.eos)

    def model_options(self) -> dict[str, Any]:
        return {
            "source_vocab": self.source.size,
            "target_vocab": self.target.size,
            "source": {"pad": self.source.pad},
            "target": {"pad": self.target.pad},
        }

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"source": self.source, "target": self.target}

    def budget(self, budget: Budget) -> Budget:
        return budget

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> StepLoss:
        assert isinstance(model, Seq2Seq)
        x, aux = target_features(model, batch)
        found = word_loss(model.head, x, batch["target_out"], pad=self.target.pad, smoothing=self.smoothing)
        return self.with_aux(found, aux)

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        return with_perplexity(super().metrics(sums, count))
