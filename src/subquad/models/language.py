"""Decoder-only language model: embedding, causal stack, and logits of the next token at every position."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

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
from subquad.nn.heads import HeadConfig, build_head
from subquad.nn.stack import Stack, StackConfig, StackOutput, StackState


class LanguageModelConfig(ModelConfig):
    kind: Literal["language-model"] = "language-model"
    vocab: int = Field(ge=1, description="The size of the vocabulary.")
    dim: int = Field(512, ge=1, description="The width of the model.")
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="The embedding of the tokens.")
    decoder: StackConfig = Field(description="The causal stack of blocks.")
    head: HeadConfig = Field(default_factory=HeadConfig, description="The output head.")

    stacks: ClassVar = {"decoder": {"causal": True}}
    stack_embeddings: ClassVar = {"decoder": "embedding"}
    ignored_data_options: ClassVar = frozenset({"answers"})


@register_model
class LanguageModel(Model):
    """Maps tokens (batch, time) to logits (batch, time, vocab)."""

    Config = LanguageModelConfig
    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self.embedding = TokenEmbedding(config.vocab, config.dim, config.embedding)
        self.decoder = Stack(config.decoder)
        self.head = build_head(config.head, config.dim, config.vocab, self.embedding)
        init_as_fairseq(self)

    @property
    def input_stack(self) -> Stack:
        return self.decoder

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        return (random_tokens(self.config.vocab, batch, length, generator),)

    def init_state(
        self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> StackState:
        """Returns the state for the first call. Each further call takes the state that the previous one returned."""
        return self.decoder.init_state(batch, device, dtype)

    def features(
        self,
        tokens: Tensor,
        padding: Tensor | Padding | None = None,
        state: StackState | None = None,
        start: Tensor | None = None,
    ) -> StackOutput:
        """Returns the inputs (batch, time, dim) of the head. Training passes them to `head.nll`.

        start: (batch,) int64, the position of each row's first token, if it is not 0 and there is no state.
        """
        x = self.embedding(tokens, padding, state.lengths if state is not None else start)
        return self.decoder(x, BlockInputs(padding), state)

    def forward(
        self, tokens: Tensor, *, padding: Tensor | Padding | None = None, state: StackState | None = None
    ) -> ModelOutput:
        """padding: (batch, time) bool, True = ignore, or `Padding`; None: there is no padding."""
        x, after, aux = self.features(tokens, padding, state)
        return ModelOutput(self.head(x), after, mean_aux(aux))
