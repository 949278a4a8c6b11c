"""From features to words: logits over the vocabulary, and the loss of given words.

forward(features (..., dim))            logits (..., vocab); of an adaptive head: log-probabilities, which do as well
nll(features (n, dim), target (n,))     -log p(target), (n,), without more of the vocabulary than the targets need
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Options
from subquad.kernels.dropout import dropout
from subquad.nn.embeddings import AdaptiveEmbedding, TokenEmbedding, vocab_bands


class HeadConfig(Options):
    """Options of the map to words."""

    tied: bool = Field(True, description="words are scored by the (target) embedding itself")
    bias: bool = Field(False, description="a bias for each word")
    cutoffs: tuple[int, ...] = Field((), description="adaptive softmax: ends of the bands of frequent words")
    factor: int = Field(4, ge=1, description="by which each further band is narrower")
    tied_maps: bool = Field(False, description="adaptive: bands share their maps with the adaptive embedding")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="adaptive: dropout in the narrower bands")


class WordHead(nn.Module):
    """A linear map to the vocabulary, its weights own or those of an embedding."""

    def __init__(self, dim: int, vocab: int, bias: bool = False, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.tied = [tied] if tied is not None else []  # in a list: the embedding's owner registers it, we do not
        self.weight = nn.Parameter(torch.empty(vocab, dim)) if tied is None else None
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=dim**-0.5)

    @property
    def table(self) -> Tensor:
        """The weights, own or tied: (vocab, dim)."""
        return self.weight if self.weight is not None else self.tied[0].weight

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.table, self.bias)

    def nll(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self(features).float(), target, reduction="none")


class AdaptiveHead(nn.Module):
    """Adaptive softmax: log p(w) of a frequent word directly, of others log p(band) + log p(w | band).

    The head scores the first band's words and one symbol for each further band b; tail b is a map to width
    dim / factor^b, then scores of its words. `tied`: words are scored by the embedding's tables; `tied_maps`: the
    tails' maps are the transposed maps of the embedding.
    """

    def __init__(self, dim: int, vocab: int, config: HeadConfig, embedding: AdaptiveEmbedding | None) -> None:
        super().__init__()
        self.bands, self.config = vocab_bands(vocab, config.cutoffs), config
        self.embedding = [embedding]  # in a list: its owner registers it, we do not
        self.clusters = nn.Parameter(nn.init.normal_(torch.empty(len(config.cutoffs), dim), std=dim**-0.5))
        self.words, self.maps = nn.ParameterList(), nn.ParameterList()
        for number, (first, end) in enumerate(self.bands):
            width = max(1, dim // config.factor**number)
            if not config.tied:
                self.words.append(nn.init.normal_(torch.empty(end - first, width), std=width**-0.5))
            if number and not config.tied_maps:
                self.maps.append(nn.init.xavier_uniform_(torch.empty(width, dim)))

    def _words(self, band: int) -> Tensor:
        if not self.config.tied:
            return self.words[band]
        assert self.embedding[0] is not None
        return self.embedding[0].tables[band]

    def _head(self, features: Tensor) -> Tensor:
        """Log-probabilities of the first band's words and of the other bands: (n, first band + bands - 1)."""
        scores = torch.cat([F.linear(features, self._words(0)), F.linear(features, self.clusters)], -1)
        return scores.float().log_softmax(-1)

    def _tail(self, features: Tensor, band: int) -> Tensor:
        """Log-probabilities of a band's words within it: (n, words)."""
        if self.config.tied_maps:
            assert self.embedding[0] is not None
            narrow = self.embedding[0].maps[band].T
        else:
            narrow = self.maps[band - 1]
        hidden = dropout(F.linear(features, narrow), self.config.dropout, self.training)
        return F.linear(hidden, self._words(band)).float().log_softmax(-1)

    def forward(self, features: Tensor) -> Tensor:
        head = self._head(features)
        frequent = self.bands[0][1]
        parts = [head[..., :frequent]]
        for band in range(1, len(self.bands)):
            parts.append(head[..., frequent + band - 1, None] + self._tail(features, band))
        return torch.cat(parts, -1)

    def nll(self, features: Tensor, target: Tensor) -> Tensor:
        head = self._head(features)
        frequent = self.bands[0][1]
        symbol = target
        for band, (first, end) in enumerate(self.bands[1:], 1):
            symbol = torch.where((target >= first) & (target < end), frequent + band - 1, symbol)
        loss = -head.gather(-1, symbol[:, None]).squeeze(-1)
        for band, (first, end) in enumerate(self.bands[1:], 1):
            rows = ((target >= first) & (target < end)).nonzero().squeeze(-1)
            within = self._tail(features[rows], band).gather(-1, (target[rows] - first)[:, None]).squeeze(-1)
            loss = loss.index_add(0, rows, -within)
        return loss


def build_head(config: HeadConfig, dim: int, vocab: int, embedding: TokenEmbedding) -> WordHead | AdaptiveHead:
    """The head of a model whose (target) tokens `embedding` embeds."""
    table = embedding.tokens
    if not config.cutoffs:
        if config.tied and not isinstance(table, nn.Embedding):
            raise ValueError(
                "head.tied: an adaptive embedding needs an adaptive head; give head.cutoffs, or tied=false"
            )
        return WordHead(dim, vocab, config.bias, table if config.tied and isinstance(table, nn.Embedding) else None)
    if config.bias:
        raise ValueError("head.bias: an adaptive head has none")
    adaptive = table if isinstance(table, AdaptiveEmbedding) else None
    same = (config.cutoffs, config.factor) == (embedding.config.cutoffs, embedding.config.factor)
    if (config.tied or config.tied_maps) and not (adaptive is not None and same):
        raise ValueError(
            "head.tied and head.tied_maps with head.cutoffs need an embedding with the same cutoffs and factor; "
            "give it those, or set both to false"
        )
    return AdaptiveHead(dim, vocab, config, adaptive)
