"""Masked language model (RoBERTa): embedding, bidirectional stack, and logits of the tokens that were masked.

The mask is the last token of the vocabulary. It occurs in no text, so tokenizers do not know it.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.mixers.layout import Padding
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
from subquad.nn.feedforward import ACTIVATIONS
from subquad.nn.heads import HeadConfig, build_head
from subquad.nn.stack import Stack, StackConfig, StackOutput


class MaskedLanguageModelConfig(ModelConfig):
    kind: Literal["masked-language-model"] = "masked-language-model"
    vocab: int = Field(ge=2, description="The size of the vocabulary, whose last token is the mask.")
    dim: int = Field(512, ge=1, description="The width of the model.")
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="The embedding of the tokens.")
    encoder: StackConfig = Field(description="The stack of blocks.")
    head_activation: Literal["relu", "gelu", "silu"] = Field(
        "gelu", description="The activation of the map before the head."
    )
    head: HeadConfig = Field(HeadConfig(bias=True), description="The output head.")

    stacks: ClassVar = {"encoder": {"causal": False, "cross": None}}
    stack_embeddings: ClassVar = {"encoder": "embedding"}

    @property
    def mask(self) -> int:
        """The id of the mask token."""
        return self.vocab - 1


@register_model
class MaskedLanguageModel(Model):
    """Maps tokens (batch, time) to logits (batch, time, vocab)."""

    Config = MaskedLanguageModelConfig
    config: MaskedLanguageModelConfig

    def __init__(self, config: MaskedLanguageModelConfig) -> None:
        super().__init__(config)
        self.embedding = TokenEmbedding(config.vocab, config.dim, config.embedding)
        self.encoder = Stack(config.encoder)
        self.last = nn.Linear(config.dim, config.dim)
        self.last_norm = nn.LayerNorm(config.dim)
        self.head = build_head(config.head, config.dim, config.vocab, self.embedding)
        init_as_fairseq(self)

    @property
    def input_stack(self) -> Stack:
        return self.encoder

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        return (random_tokens(self.config.vocab, batch, length, generator),)

    def features(self, tokens: Tensor, padding: Tensor | Padding | None = None) -> StackOutput:
        """Returns the output of the stack: (batch, time, dim)."""
        return self.encoder(self.embedding(tokens, padding), BlockInputs(padding))

    def head_inputs(self, features: Tensor) -> Tensor:
        """Turns features (..., dim) into inputs of the head, of the same shape. Only those of targets need it."""
        return self.last_norm(ACTIVATIONS[self.config.head_activation](self.last(features)))

    def forward(self, tokens: Tensor, *, padding: Tensor | Padding | None = None) -> ModelOutput:
        """padding: (batch, time) bool, True = ignore, or `Padding`; None: there is no padding."""
        x, _, aux = self.features(tokens, padding)
        return ModelOutput(self.head(self.head_inputs(x)), None, mean_aux(aux))
