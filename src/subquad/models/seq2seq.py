"""Encoder-decoder: the encoder reads the source; the decoder attends to its output and predicts the target."""

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


class Seq2SeqConfig(ModelConfig):
    kind: Literal["encoder-decoder"] = "encoder-decoder"
    source_vocab: int = Field(ge=1, description="The size of the source vocabulary.")
    target_vocab: int = Field(ge=1, description="The size of the target vocabulary.")
    dim: int = Field(512, ge=1, description="The width of the model.")
    source: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="The embedding of the source tokens.")
    target: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="The embedding of the target tokens.")
    shared_embedding: bool = Field(False, description="Whether source and target share one embedding.")
    encoder: StackConfig = Field(description="The stack of blocks of the encoder.")
    decoder: StackConfig = Field(
        description="The causal stack of blocks of the decoder. Its cross-attention is softmax by default."
    )
    head: HeadConfig = Field(default_factory=HeadConfig, description="The output head.")

    stacks: ClassVar = {"encoder": {"causal": False, "cross": None}, "decoder": {"causal": True}}
    defaults: ClassVar = {"decoder": {"cross": "softmax"}}
    stack_embeddings: ClassVar = {"encoder": "source", "decoder": "target"}

    def check(self) -> None:
        if self.decoder.cross is None:
            raise ValueError("decoder.cross is null, but a decoder needs cross-attention; leave it out for softmax")
        if self.shared_embedding and self.source_vocab != self.target_vocab:
            raise ValueError(
                f"shared_embedding needs one vocabulary; the source has {self.source_vocab} tokens, "
                f"the target {self.target_vocab}"
            )


@register_model
class Seq2Seq(Model):
    """Maps source (batch, time) and target (batch, time') to logits (batch, time', target_vocab)."""

    Config = Seq2SeqConfig
    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.target = TokenEmbedding(config.target_vocab, config.dim, config.target)
        self.source = TokenEmbedding(config.source_vocab, config.dim, config.source)
        if config.shared_embedding:
            self.source.share(self.target)
        self.encoder, self.decoder = Stack(config.encoder), Stack(config.decoder)
        self.head = build_head(config.head, config.dim, config.target_vocab, self.target)
        init_as_fairseq(self)

    @property
    def input_stack(self) -> Stack:
        return self.encoder

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        sizes = self.config.source_vocab, self.config.target_vocab
        return tuple(random_tokens(size, batch, length, generator) for size in sizes)

    def init_state(
        self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> StackState:
        """Returns the state for the first call of `decode`, which also takes the context; then the state holds it."""
        return self.decoder.init_state(batch, device, dtype)

    def encode(self, source: Tensor, padding: Tensor | Padding | None = None) -> StackOutput:
        """Returns the context (batch, time, dim) that the decoder attends to."""
        return self.encoder(self.source(source, padding), BlockInputs(padding))

    def features(
        self,
        target: Tensor,
        context: Tensor | None,
        padding: Tensor | Padding | None = None,
        context_padding: Tensor | Padding | None = None,
        state: StackState | None = None,
    ) -> StackOutput:
        """Returns the inputs (batch, time', dim) of the head."""
        x = self.target(target, padding, state.lengths if state is not None else None)
        return self.decoder(x, BlockInputs(padding, context, context_padding), state)

    def decode(
        self,
        target: Tensor,
        context: Tensor | None = None,
        *,
        padding: Tensor | Padding | None = None,
        context_padding: Tensor | Padding | None = None,
        state: StackState | None = None,
    ) -> ModelOutput:
        """Returns logits of the next target token at each position. context: from `encode`; streaming needs it once."""
        x, after, aux = self.features(target, context, padding, context_padding, state)
        return ModelOutput(self.head(x), after, mean_aux(aux))

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding: Tensor | Padding | None = None,
        target_padding: Tensor | Padding | None = None,
    ) -> ModelOutput:
        """Paddings are (batch, time) bool, True = ignore, or `Padding`; None: there is no padding."""
        context, _, encoder_aux = self.encoder(self.source(source, source_padding), BlockInputs(source_padding))
        x, _, decoder_aux = self.features(target, context, target_padding, source_padding)
        return ModelOutput(self.head(x), None, mean_aux(encoder_aux, decoder_aux))
