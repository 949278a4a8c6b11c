"""Text classifier: embedding, bidirectional stack, pooling to one vector for each text, and a head for the classes."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.mixers.layout import Padding, padding_tensor
from subquad.models.base import (
    Model,
    ModelConfig,
    ModelOutput,
    init_as_fairseq,
    mean_aux,
    random_tokens,
    register_model,
)
from subquad.nn.block import BlockInputs
from subquad.nn.embeddings import EmbeddingConfig, TokenEmbedding
from subquad.nn.stack import Stack, StackConfig


class TextClassifierConfig(ModelConfig):
    kind: Literal["text-classifier"] = "text-classifier"
    vocab: int = Field(ge=1, description="The size of the vocabulary.")
    num_classes: int = Field(ge=1, description="The number of classes.")
    dim: int = Field(512, ge=1, description="The width of the model.")
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="The embedding of the tokens.")
    encoder: StackConfig = Field(description="The stack of blocks.")
    pooling: Literal["mean", "first"] = Field(
        "mean", description="Whether the mean of all tokens is classified, or the first token."
    )
    head_hidden_dim: int | None = Field(
        None, ge=1, description="The width of a hidden layer of the head; null: there is none."
    )

    stacks: ClassVar = {"encoder": {"causal": False, "cross": None}}
    stack_embeddings: ClassVar = {"encoder": "embedding"}


@register_model
class TextClassifier(Model):
    """Maps tokens (batch, time) to logits (batch, num_classes)."""

    Config = TextClassifierConfig
    config: TextClassifierConfig

    def __init__(self, config: TextClassifierConfig) -> None:
        super().__init__(config)
        self.embedding = TokenEmbedding(config.vocab, config.dim, config.embedding)
        self.encoder = Stack(config.encoder)
        self.head = _build_class_head(config.dim, config.head_hidden_dim, config.num_classes)
        init_as_fairseq(self)

    @property
    def input_stack(self) -> Stack:
        return self.encoder

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        return (random_tokens(self.config.vocab, batch, length, generator),)

    def forward(self, tokens: Tensor, *, padding: Tensor | Padding | None = None) -> ModelOutput:
        """padding: (batch, time) bool, True = ignore, or `Padding`; None: there is no padding."""
        x, _, aux = self.encoder(self.embedding(tokens, padding), BlockInputs(padding))
        return ModelOutput(self.head(self._pool(x, padding_tensor(padding))), None, mean_aux(aux))

    def _pool(self, x: Tensor, padding: Tensor | None) -> Tensor:
        if self.config.pooling == "first":
            if padding is None:
                return x[:, 0]
            first = padding.int().argmin(1)  # the first token; a row of padding only has its first position
            return x.gather(1, first[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)
        if padding is None:
            return x.mean(1)
        mask = padding.logical_not()[..., None]
        return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


def _build_class_head(dim: int, hidden_dim: int | None, num_classes: int) -> nn.Module:
    if hidden_dim is None:
        return nn.Linear(dim, num_classes)
    return nn.Sequential(nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_classes))
