"""Encoder-decoder: the encoder reads the source, the decoder writes the target and reads the encoder's output."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

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
    source_vocab: int = Field(ge=1, description="number of source symbols")
    target_vocab: int = Field(ge=1, description="number of target symbols")
    dim: int = Field(512, ge=1, description="width of the model")
    source: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="how source tokens become vectors")
    target: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="how target tokens become vectors")
    shared_embedding: bool = Field(False, description="source and target tokens have one embedding")
    encoder: StackConfig = Field(description="the stack that reads the source")
    decoder: StackConfig = Field(description="the causal stack, with cross-attention; softmax unless it says otherwise")
    head: HeadConfig = Field(default_factory=HeadConfig, description="how vectors become words")

    stacks: ClassVar = {"encoder": {"causal": False, "cross": None}, "decoder": {"causal": True}}
    defaults: ClassVar = {"decoder": {"cross": "softmax"}}
    stack_embeddings: ClassVar = {"encoder": "source", "decoder": "target"}

    def check(self) -> None:
        if self.decoder.cross is None:
            raise ValueError("decoder.cross is null: a decoder reads the encoder's output; leave it out for softmax")
        if self.shared_embedding and self.source_vocab != self.target_vocab:
            raise ValueError(
                f"shared_embedding needs one vocabulary; the source has {self.source_vocab} symbols, "
                f"the target {self.target_vocab}"
            )


@register_model
class Seq2Seq(Model):
    """source (batch, time), target (batch, time') -> logits (batch, time', target_vocab)."""

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
        """The state to begin decoding with. The first call of `decode` brings the context; the state then holds it."""
        return self.decoder.init_state(batch, device, dtype)

    def encode(self, source: Tensor, padding: Tensor | None = None) -> StackOutput:
        """The context (batch, time, dim) that the decoder reads."""
        return self.encoder(self.source(source, padding), BlockInputs(padding))

    def features(
        self,
        target: Tensor,
        context: Tensor | None,
        padding: Tensor | None = None,
        context_padding: Tensor | None = None,
        state: StackState | None = None,
    ) -> StackOutput:
        """What the head reads: (batch, time', dim)."""
        x = self.target(target, padding, state.lengths if state is not None else None)
        return self.decoder(x, BlockInputs(padding, context, context_padding), state)

    def decode(
        self,
        target: Tensor,
        context: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        context_padding: Tensor | None = None,
        state: StackState | None = None,
    ) -> ModelOutput:
        """Logits of the next target token at each position. context: what `encode` gave; streaming needs it once."""
        x, after, aux = self.features(target, context, padding, context_padding, state)
        return ModelOutput(self.head(x), after, mean_aux(aux))

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
    ) -> ModelOutput:
        """Paddings: (batch, time) bool, True = ignore; None: every token counts."""
        context, _, encoder_aux = self.encoder(self.source(source, source_padding), BlockInputs(source_padding))
        x, _, decoder_aux = self.features(target, context, target_padding, source_padding)
        return ModelOutput(self.head(x), None, mean_aux(encoder_aux, decoder_aux))
