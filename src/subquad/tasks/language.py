"""Language modelling: every token given those before it, from prepared text cut into blocks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from subquad.data.batches import Batch, Budget
from subquad.data.blocks import BlockOptions, Blocks, collate_blocks
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import Tokenizer
from subquad.models import LanguageModel, Model
from subquad.models.base import mean_aux
from subquad.tasks.base import StepLoss, Task, with_perplexity
from subquad.tasks.losses import losses_by_row, word_loss


class BlockSamples:
    """Blocks of one store."""

    def __init__(self, blocks: Blocks, pad: int) -> None:
        self.blocks, self.pad = blocks, pad
        self.sizes: tuple[np.ndarray, ...] = (blocks.sizes,)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        batch = collate_blocks([self.blocks[int(i)] for i in numbers], self.pad)
        return {"inputs": batch["inputs"], "targets": batch["targets"]}


def block_losses(model: LanguageModel, batch: Mapping[str, Tensor], pad: int) -> list[list[float]]:
    """[summed nll, number of targets] of every block of a batch; targets that are padding do not count."""
    x, _, _ = model.features(batch["inputs"])
    return losses_by_row(model.head, x, batch["targets"], pad=pad)


class LanguageTask(Task):
    name = "language-model"

    def __init__(self, data: PreparedText, blocks: BlockOptions, smoothing: float, aux_weight: float) -> None:
        super().__init__(smoothing, aux_weight)
        self.data, self.blocks, self.tokenizer = data, blocks, data.tokenizer("text")

    def samples(self, split: str, training: bool) -> BlockSamples:  # noqa: ARG002
        blocks = Blocks(self.data.store(split, "text"), self.blocks, self.tokenizer.eos)
        return BlockSamples(blocks, self.tokenizer.pad)

    def model_options(self) -> dict[str, Any]:
        return {"vocab": self.tokenizer.size, "embedding": {"pad": self.tokenizer.pad}}

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {"text": self.tokenizer}

    def budget(self, budget: Budget) -> Budget:
        return budget

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> StepLoss:
        assert isinstance(model, LanguageModel)
        # Blocks are padded after their end, where a causal model shows nothing to the tokens before.
        x, _, aux = model.features(batch["inputs"])
        found = word_loss(model.head, x, batch["targets"], pad=self.tokenizer.pad, smoothing=self.smoothing)
        return self.with_aux(found, mean_aux(aux))

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        return with_perplexity(super().metrics(sums, count))
