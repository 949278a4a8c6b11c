"""Masked language model: embedding, bidirectional stack, logits of the words that were masked (RoBERTa).

A masked word is replaced by a symbol of its own, the last of the vocabulary: no text has it, so no tokenizer does.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

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
    vocab: int = Field(ge=2, description="number of symbols; the last stands in the place of masked words")
    dim: int = Field(512, ge=1, description="width of the model")
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="how tokens become vectors")
    encoder: StackConfig = Field(description="the stack")
    head_activation: Literal["relu", "gelu", "silu"] = Field("gelu", description="of the map before the words")
    head: HeadConfig = Field(HeadConfig(bias=True), description="how vectors become words")

    stacks: ClassVar = {"encoder": {"causal": False, "cross": None}}
    stack_embeddings: ClassVar = {"encoder": "embedding"}

    @property
    def mask(self) -> int:
        """Number of the symbol that hides a word."""
        return self.vocab - 1


@register_model
class MaskedLanguageModel(Model):
    """tokens (batch, time) -> logits (batch, time, vocab)."""

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

    def features(self, tokens: Tensor, padding: Tensor | None = None) -> StackOutput:
        """What the stack makes of the tokens: (batch, time, dim)."""
        return self.encoder(self.embedding(tokens, padding), BlockInputs(padding))

    def head_inputs(self, features: Tensor) -> Tensor:
        """What the head reads of features (..., dim), of those alone whose words are asked for: the same shape."""
        return self.last_norm(ACTIVATIONS[self.config.head_activation](self.last(features)))

    def forward(self, tokens: Tensor, *, padding: Tensor | None = None) -> ModelOutput:
        """padding: (batch, time) bool, True = ignore; None: every token counts."""
        x, _, aux = self.features(tokens, padding)
        return ModelOutput(self.head(self.head_inputs(x)), None, mean_aux(aux))
