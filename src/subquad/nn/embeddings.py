"""From token numbers to vectors: embedding, scaled, plus positions, normalised, dropped out."""

import itertools
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Options
from subquad.kernels.dropout import dropout
from subquad.nn.positions import build_positions, position_ids


class EmbeddingConfig(Options):
    """Options of a token embedding. Its width is that of the model."""

    positions: Literal["sinusoidal", "sin-cos", "learned", "rotary", "none"] = Field(
        "sinusoidal",
        description="what tells positions apart: fairseq's sinusoids, those of 10000^(2i/C), a learned table, or "
        "rotated queries and keys",
    )
    max_length: int = Field(1024, ge=1, description="rows of a learned table of positions")
    scale: bool = Field(True, description="multiply embeddings by the square root of the width")
    norm: bool = Field(False, description="layer norm after adding positions")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the embedded tokens")
    pad: int | None = Field(1, ge=0, description="number of the padding symbol, whose row stays as it is")
    cutoffs: tuple[int, ...] = Field(
        (), description="adaptive input: ends of the bands of frequent words; rarer bands have narrower vectors"
    )
    factor: int = Field(4, ge=1, description="by which each further band is narrower")

    def check(self) -> None:
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or any(c < 1 for c in self.cutoffs):
            raise ValueError(f"cutoffs must be positive and rise, got {list(self.cutoffs)}")


def vocab_bands(vocab: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    """First word and end of each band of the vocabulary."""
    if cutoffs and cutoffs[-1] >= vocab:
        raise ValueError(f"the last cutoff, {cutoffs[-1]}, must be below the vocabulary size {vocab}")
    return list(itertools.pairwise([0, *cutoffs, vocab]))


class AdaptiveEmbedding(nn.Module):
    """Tokens (...) -> (..., dim): band b has vectors of width dim / factor^b, and a linear map from them to dim."""

    def __init__(self, vocab: int, dim: int, config: EmbeddingConfig) -> None:
        super().__init__()
        self.bands, self.pad = vocab_bands(vocab, config.cutoffs), config.pad
        self.tables, self.maps = nn.ParameterList(), nn.ParameterList()
        for number, (first, end) in enumerate(self.bands):
            width = max(1, dim // config.factor**number)
            self.tables.append(_table(end - first, width, self._pad_in(first, end)).weight)
            self.maps.append(nn.init.xavier_uniform_(torch.empty(dim, width)))

    def forward(self, tokens: Tensor) -> Tensor:
        # Every band reads every token, and what is not its own is set to zero: no shape depends on the words.
        parts = []
        for (first, end), table, to_model in zip(self.bands, self.tables, self.maps, strict=True):
            own = (tokens >= first) & (tokens < end)
            rows = (tokens - first).clamp(0, end - first - 1)
            vectors = F.embedding(rows, table, padding_idx=self._pad_in(first, end))
            parts.append(F.linear(vectors * own[..., None], to_model))
        return torch.stack(parts).sum(0)

    def _pad_in(self, first: int, end: int) -> int | None:
        """Row of the padding symbol in a band, None if it is not there."""
        return self.pad - first if self.pad is not None and first <= self.pad < end else None


def _table(vocab: int, dim: int, pad: int | None) -> nn.Embedding:
    table = nn.Embedding(vocab, dim, padding_idx=pad)
    nn.init.normal_(table.weight, std=dim**-0.5)
    if pad is not None:
        with torch.no_grad():
            table.weight[pad].zero_()
    return table


class TokenEmbedding(nn.Module):
    """tokens (batch, time) -> (batch, time, dim)."""

    def __init__(self, vocab: int, dim: int, config: EmbeddingConfig) -> None:
        super().__init__()
        if config.pad is not None and config.pad >= vocab:
            raise ValueError(f"pad is {config.pad}, but there are only {vocab} symbols; set pad lower or to null")
        self.config, self.vocab, self.dim = config, vocab, dim
        self.shared: list[AdaptiveEmbedding | nn.Embedding] = []  # in a list: its owner registers it
        self.tokens: AdaptiveEmbedding | nn.Embedding
        self.tokens = AdaptiveEmbedding(vocab, dim, config) if config.cutoffs else _table(vocab, dim, config.pad)
        self.positions = build_positions(config.positions, dim, config.max_length)
        self.norm = nn.LayerNorm(dim) if config.norm else None

    def share(self, other: "TokenEmbedding") -> None:
        """Takes the other's table of tokens instead of an own one; the other registers it."""
        del self.tokens
        self.shared = [other.tokens]

    def forward(self, tokens: Tensor, padding: Tensor | None = None, start: Tensor | None = None) -> Tensor:
        """padding: (batch, time) bool, True = ignore. start: (batch,) tokens that each row has read before."""
        x = (self.shared[0] if self.shared else self.tokens)(tokens)
        if self.config.scale:
            x = x * self.dim**0.5
        if self.positions is not None:
            number = position_ids(padding, tokens.shape[1], start, tokens.device)
            x = x + self.positions(number).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = dropout(x, self.config.dropout, self.training)
        return x if padding is None else x.masked_fill(padding[..., None], 0)
