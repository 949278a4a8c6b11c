"""What decoding asks of models: scores of the next token for many rows at once, and rows that move.

A scorer holds the streaming state of its rows. `step` reads one token a row and scores the next; `reorder` keeps, drops
and repeats rows, as StackState does. An ensemble is a scorer of the mean probability of its members.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from subquad.kernels.vocabulary import log_sum_exp
from subquad.models import LanguageModel, Seq2Seq
from subquad.nn.stack import StackState


class TokenScores(NamedTuple):
    """log p(w) of row r is (values[r, w] - normaliser[r]): subtracted where it is needed only. values: (rows, V)."""

    values: Tensor
    normaliser: Tensor

    @classmethod
    def of(cls, logits: Tensor, temperature: float = 1.0) -> "TokenScores":
        values = logits.float() if temperature == 1 else logits.float() / temperature
        return cls(values, log_sum_exp(values))

    def log_probabilities(self) -> Tensor:
        return self.values - self.normaliser[:, None]


class Scorer(Protocol):
    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        """Reads `tokens` (rows,) and scores what follows."""
        ...

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        """Goes on with the rows `index`; contexts: see StackState.reorder."""
        ...


class Seq2SeqScorer:
    """Scores the target of each source; the sources are encoded once."""

    def __init__(self, model: Seq2Seq, source: Tensor, padding: Tensor | None) -> None:
        """source: (rows, time) ending with eos; padding: True = ignore."""
        self.model = model
        self.context: Tensor | None = model.encode(source, padding).x
        self.padding = padding
        self.state: StackState = model.init_state(source.shape[0], source.device)

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        found = self.model.decode(tokens[:, None], self.context, context_padding=self.padding, state=self.state)
        assert found.state is not None
        self.state, self.context, self.padding = found.state, None, None  # the state remembers the context
        return TokenScores.of(found.logits[:, 0], temperature)

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        self.state = self.state.reorder(index, contexts)


class LanguageModelScorer:
    """Scores the continuation of texts."""

    def __init__(self, model: LanguageModel, state: StackState) -> None:
        """state: after all tokens but the one that the first step reads."""
        self.model, self.state = model, state

    @classmethod
    def after(cls, model: LanguageModel, prompts: Tensor, padding: Tensor | None) -> "LanguageModelScorer":
        """Reads `prompts` (rows, time), which may have no token at all; padding: True = ignore."""
        state = model.init_state(prompts.shape[0], prompts.device)
        if prompts.shape[1]:
            read = model.features(prompts, padding, state).state
            assert read is not None
            state = read
        return cls(model, state)

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        found = self.model(tokens[:, None], state=self.state)
        assert found.state is not None
        self.state = found.state
        return TokenScores.of(found.logits[:, 0], temperature)

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        self.state = self.state.reorder(index, contexts)


class Ensemble:
    """log p = log of the mean of the members' probabilities."""

    def __init__(self, members: Sequence[Scorer]) -> None:
        self.members = members

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        each = [member.step(tokens, temperature).log_probabilities() for member in self.members]
        mean = torch.stack(each).logsumexp(0) - math.log(len(each))
        return TokenScores(mean, mean.new_zeros(mean.shape[0]))

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        for member in self.members:
            member.reorder(index, contexts)


def combine_scorers(scorers: Sequence[Scorer]) -> Scorer:
    """One scorer of several: a single one needs no mean."""
    return scorers[0] if len(scorers) == 1 else Ensemble(scorers)
