"""Masked language modelling: the hidden tokens of a text, given all others, from prepared text cut into blocks.

A sample is the symbol of a beginning and a block of tokens. Which of them are hidden depends on the sample and on the
seed that the trainer gives its batch: training hides others in each epoch, validation and evaluation always the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from subquad.data.batches import Batch, Budget
from subquad.data.blocks import BlockOptions, Blocks, Lines, collate_blocks
from subquad.data.masking import Masking, MaskOptions
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import Tokenizer
from subquad.models import MaskedLanguageModel, Model
from subquad.models.base import mean_aux
from subquad.tasks.base import StepLoss, Task, with_perplexity
from subquad.tasks.losses import losses_by_row, word_loss

BEGINNING = 1
"""Tokens of a sample before its block."""
AROUND = BEGINNING + 1
"""Those and the end of a line."""


def beginning(tokenizer: Tokenizer) -> int:
    """The symbol that a sample begins with. Numbers that others made may have none: then it is that of an end."""
    return tokenizer.bos if tokenizer.bos >= 0 else tokenizer.eos


class MaskedSamples:
    """Blocks of one store, with some of their tokens hidden."""

    def __init__(self, store: Lines, blocks: BlockOptions, masking: MaskOptions, tokenizer: Tokenizer) -> None:
        if blocks.tokens_per_sample <= BEGINNING:
            raise ValueError(f"data.blocks.tokens_per_sample is {blocks.tokens_per_sample}; the beginning is one token")
        shorter = blocks.model_copy(update={"tokens_per_sample": blocks.tokens_per_sample - BEGINNING})
        self.blocks, self.tokenizer = Blocks(store, shorter, tokenizer.eos), tokenizer
        self.first = beginning(tokenizer)
        special = [tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk]
        words = np.setdiff1d(np.arange(tokenizer.size), special)
        self.masking = Masking(masking, tokenizer.size, words if len(words) else np.array([tokenizer.unk]))
        self.sizes: tuple[np.ndarray, ...] = (self.blocks.sizes + BEGINNING,)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        """inputs (B, T); targets (B, T): the hidden tokens, padding where nothing is asked; padding (B, T)."""
        return collate_blocks([self._sample(int(number), seed) for number in numbers], self.tokenizer.pad)

    def _sample(self, number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.blocks.stream(int(self.blocks.begin[number]), int(self.blocks.end[number]))
        read, asked = self.masking.apply(tokens, np.random.default_rng([seed, number]))
        targets = np.where(asked, tokens, self.tokenizer.pad)
        # the beginning is no word: it is neither hidden nor asked for
        return np.append(self.first, read), np.append(self.tokenizer.pad, targets)


def hidden_losses(model: MaskedLanguageModel, batch: Mapping[str, Tensor], pad: int) -> list[list[float]]:
    """[summed nll, number of targets] of every sample of a batch."""
    x, _, _ = model.features(batch["inputs"], _some(batch["padding"]))
    return losses_by_row(model.head, model.words(x), batch["targets"], pad=pad)


def _some(padding: Tensor) -> Tensor | None:
    """Padding that hides nothing is none: mechanisms are faster without."""
    return padding if bool(padding.any()) else None


class MaskedTask(Task):
    name = "masked-language-model"

    def __init__(
        self, data: PreparedText, blocks: BlockOptions, masking: MaskOptions, smoothing: float, aux_weight: float
    ) -> None:
        super().__init__(smoothing, aux_weight)
        self.data, self.blocks, self.masking, self.tokenizer = data, blocks, masking, data.tokenizer("text")

    def samples(self, split: str, training: bool) -> MaskedSamples:  # noqa: ARG002
        return MaskedSamples(self.data.store(split, "text"), self.blocks, self.masking, self.tokenizer)

    def model_options(self) -> dict[str, Any]:
        return {"vocab": self.tokenizer.size + 1, "embedding": {"pad": self.tokenizer.pad}}

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"text": self.tokenizer}

    def budget(self, budget: Budget) -> Budget:
        return budget

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> StepLoss:
        assert isinstance(model, MaskedLanguageModel)
        pad, targets = self.tokenizer.pad, batch["targets"]
        x, _, aux = model.features(batch["inputs"], _some(batch["padding"]))
        asked = (targets != pad).flatten().nonzero().squeeze(1)  # the others' words need not be made
        words = model.words(x.flatten(0, 1).index_select(0, asked))
        found = word_loss(model.head, words, targets.flatten()[asked], pad=pad, smoothing=self.smoothing)
        return self.with_aux(found, mean_aux(aux))

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        return with_perplexity(super().metrics(sums, count))
