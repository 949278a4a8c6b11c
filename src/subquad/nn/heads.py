"""Output heads: logits over the vocabulary, and the loss of given tokens.

forward(features (..., dim))            logits (..., vocab); an adaptive head returns log-probabilities instead
nll(features (n, dim), target (n,))     -log p(target), (n,); an adaptive head computes only the bands of the targets
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Options
from subquad.kernels.dropout import dropout
from subquad.nn.embeddings import AdaptiveEmbedding, TokenEmbedding, vocab_bands


class HeadConfig(Options):
    """Options of the output head, which scores the tokens of the vocabulary."""

    tied: bool = Field(True, description="Whether the head shares its weights with the (target) embedding.")
    bias: bool = Field(False, description="Whether each token has a bias.")
    cutoffs: tuple[int, ...] = Field((), description="Adaptive softmax: the ends of the bands of frequent tokens.")
    factor: int = Field(4, ge=1, description="The factor by which each further band is narrower.")
    tied_maps: bool = Field(False, description="Adaptive: whether bands share their maps with the embedding.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Adaptive: the dropout rate in the narrower bands.")


class WordHead(nn.Module):
    """A linear map to the vocabulary, with weights of its own or those of an embedding."""

    def __init__(self, dim: int, vocab: int, bias: bool = False, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.tied = [tied] if tied is not None else []  # in a list: the embedding's owner registers it, we do not
        if tied is None:
            self.register_parameter("weight", nn.Parameter(nn.init.normal_(torch.empty(vocab, dim), std=dim**-0.5)))
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The weights (vocab, dim): its own, which is the parameter of this name, or those of the embedding."""
        own = self.tied[0].weight if self.tied else self._parameters.get("weight")
        if own is None:
            raise AttributeError("the head has no weight yet")  # as torch expects of a name that it registers
        return own

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)

    def nll(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self(features).float(), target, reduction="none")


class AdaptiveHead(nn.Module):
    """Adaptive softmax: log p(w) for tokens of the first band, log p(band) + log p(w | band) for the others.

    The head scores the tokens of the first band and one symbol for each further band b. Tail b is a map to width
    dim / factor^b, followed by the scores of its tokens. tied: tokens are scored by the tables of the embedding.
    tied_maps: the maps of the tails are the transposed maps of the embedding.
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
        """Log-probabilities of the tokens of the first band and of the other bands: (n, first band + bands - 1)."""
        scores = torch.cat([F.linear(features, self._words(0)), F.linear(features, self.clusters)], -1)
        return scores.float().log_softmax(-1)

    def _tail(self, features: Tensor, band: int) -> Tensor:
        """Log-probabilities of the tokens of a band, given the band: (n, tokens)."""
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

    def nll(self, features: Tensor, target: Tensor, words: Tensor | None = None) -> Tensor:
        """-log p of targets (n,), given features (n, dim).

        words: the targets once more, on the CPU. Without them a GPU is asked which targets belong to a band, and the
        pass waits for its answer.
        """
        head = self._head(features)
        frequent = self.bands[0][1]
        symbol = target
        for band, (first, end) in enumerate(self.bands[1:], 1):
            symbol = torch.where((target >= first) & (target < end), frequent + band - 1, symbol)
        loss = -head.gather(-1, symbol[:, None]).squeeze(-1)
        for band, (first, end) in enumerate(self.bands[1:], 1):
            rows = self._rows(target if words is None else words, first, end, features.device)
            within = self._tail(features[rows], band).gather(-1, (target[rows] - first)[:, None]).squeeze(-1)
            loss = loss.index_add(0, rows, -within)
        return loss

    @staticmethod
    def _rows(words: Tensor, first: int, end: int, device: torch.device) -> Tensor:
        """The places, on a device, of words (n,) that belong to a band."""
        return copy_without_waiting(((words >= first) & (words < end)).nonzero().squeeze(-1), device)


def copy_without_waiting(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; a copy from the CPU to a GPU goes on while the process does."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()  # from other memory a copy is not asynchronous
    return x.to(device, non_blocking=True)


def build_head(config: HeadConfig, dim: int, vocab: int, embedding: TokenEmbedding) -> WordHead | AdaptiveHead:
    """Builds the head of a model. embedding: that of the (target) tokens."""
    table = embedding.tokens
    if not config.cutoffs:
        if config.tied and not isinstance(table, nn.Embedding):
            raise ValueError(
                "head.tied: an adaptive embedding needs an adaptive head; give head.cutoffs, or tied=false"
            )
        return WordHead(dim, vocab, config.bias, table if config.tied and isinstance(table, nn.Embedding) else None)
    if config.bias:
        raise ValueError("head.bias: an adaptive head has no bias; leave it out")
    adaptive = table if isinstance(table, AdaptiveEmbedding) else None
    same = (config.cutoffs, config.factor) == (embedding.config.cutoffs, embedding.config.factor)
    if (config.tied or config.tied_maps) and not (adaptive is not None and same):
        raise ValueError(
            "head.tied and head.tied_maps with head.cutoffs need an embedding with the same cutoffs and factor; "
            "give it those, or set both to false"
        )
    return AdaptiveHead(dim, vocab, config, adaptive)
