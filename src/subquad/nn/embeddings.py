"""Turns token ids into vectors: embedding, scale, positions, layer norm and dropout."""

import itertools
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Options
from subquad.kernels.dropout import dropout
from subquad.mixers.layout import Padding, padding_tensor, zero_padding
from subquad.nn.positions import build_positions, position_ids


class EmbeddingConfig(Options):
    """Options of a token embedding. Its vectors are as wide as the model."""

    positions: Literal["sinusoidal", "sin-cos", "learned", "rotary", "none"] = Field(
        "sinusoidal",
        description="How positions are encoded: fairseq's sinusoids, sinusoids with frequencies 10000^(-2i/C), a "
        "learned table, or rotary queries and keys.",
    )
    max_length: int = Field(1024, ge=1, description="The number of rows of a learned table of positions.")
    scale: bool = Field(True, description="Whether embeddings are multiplied by the square root of the width.")
    norm: bool = Field(False, description="Whether a layer norm follows the addition of positions.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="The dropout rate of the embedded tokens.")
    pad: int | None = Field(
        1, ge=0, description="The id of the padding token, whose embedding is zero at first; null: there is none."
    )
    cutoffs: tuple[int, ...] = Field(
        (),
        description="Adaptive input: the ends of the bands of frequent tokens. Later bands have narrower vectors.",
    )
    factor: int = Field(4, ge=1, description="The factor by which each further band is narrower.")

    def check(self) -> None:
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or any(c < 1 for c in self.cutoffs):
            raise ValueError(f"cutoffs must be positive and rise, got {list(self.cutoffs)}")


def vocab_bands(vocab: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the first token and the end of each band of the vocabulary."""
    if cutoffs and cutoffs[-1] >= vocab:
        raise ValueError(
            f"the last cutoff, {cutoffs[-1]}, must be below the vocabulary size {vocab}: set model.embedding.cutoffs "
            "and model.head.cutoffs, or both to []"
        )
    return list(itertools.pairwise([0, *cutoffs, vocab]))


class AdaptiveEmbedding(nn.Module):
    """Maps tokens (...) to (..., dim). Band b has vectors of width dim / factor^b and a linear map from them to dim."""

    def __init__(self, vocab: int, dim: int, config: EmbeddingConfig) -> None:
        super().__init__()
        self.bands, self.pad = vocab_bands(vocab, config.cutoffs), config.pad
        self.tables, self.maps = nn.ParameterList(), nn.ParameterList()
        for number, (first, end) in enumerate(self.bands):
            width = max(1, dim // config.factor**number)
            self.tables.append(_table(end - first, width, self._pad_in(first, end)).weight)
            self.maps.append(nn.init.xavier_uniform_(torch.empty(dim, width)))

    def forward(self, tokens: Tensor) -> Tensor:
        # Every band embeds every token and zeroes those of other bands, so that no shape depends on the tokens.
        parts = []
        for (first, end), table, to_model in zip(self.bands, self.tables, self.maps, strict=True):
            own = (tokens >= first) & (tokens < end)
            rows = (tokens - first).clamp(0, end - first - 1)
            vectors = F.embedding(rows, table, padding_idx=self._pad_in(first, end))
            parts.append(F.linear(vectors * own[..., None], to_model))
        return torch.stack(parts).sum(0)

    def _pad_in(self, first: int, end: int) -> int | None:
        """Returns the row of the padding token in a band, or None if the band does not contain it."""
        return self.pad - first if self.pad is not None and first <= self.pad < end else None


def _table(vocab: int, dim: int, pad: int | None) -> nn.Embedding:
    table = nn.Embedding(vocab, dim, padding_idx=pad)
    nn.init.normal_(table.weight, std=dim**-0.5)
    if pad is not None:
        with torch.no_grad():
            table.weight[pad].zero_()
    return table


class TokenEmbedding(nn.Module):
    """Maps tokens (batch, time) to vectors (batch, time, dim)."""

    def __init__(self, vocab: int, dim: int, config: EmbeddingConfig) -> None:
        super().__init__()
        if config.pad is not None and config.pad >= vocab:
            raise ValueError(
                f"pad is {config.pad}, but the vocabulary has only {vocab} tokens; set pad lower or to null"
            )
        self.config, self.vocab, self.dim = config, vocab, dim
        self.shared: list[AdaptiveEmbedding | nn.Embedding] = []  # in a list: its owner registers it
        self.tokens: AdaptiveEmbedding | nn.Embedding
        self.tokens = AdaptiveEmbedding(vocab, dim, config) if config.cutoffs else _table(vocab, dim, config.pad)
        self.positions = build_positions(config.positions, dim, config.max_length)
        self.norm = nn.LayerNorm(dim) if config.norm else None

    def share(self, other: "TokenEmbedding") -> None:
        """Uses the token table of `other`, which also registers it, instead of its own."""
        del self.tokens
        self.shared = [other.tokens]

    @property
    def table(self) -> AdaptiveEmbedding | nn.Embedding:
        """The token table: its own, or that of the embedding with which it shares one."""
        return self.shared[0] if self.shared else self.tokens

    def forward(self, tokens: Tensor, padding: Tensor | Padding | None = None, start: Tensor | None = None) -> Tensor:
        """padding: (batch, time) bool, True = ignore. start: (batch,) the number of earlier tokens of each row.

        tokens: ids (batch, time), or floats (batch, time, dim) that take the place of what the table gives.
        """
        padding = padding_tensor(padding)
        x = tokens if tokens.is_floating_point() else self.table(tokens)
        if self.config.scale:
            x = x * self.dim**0.5
        if self.positions is not None:
            number = position_ids(padding, tokens.shape[1], start, tokens.device)
            x = x + self.positions(number).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = dropout(x, self.config.dropout, self.training)
        return zero_padding(x, padding)
