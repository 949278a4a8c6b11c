"""Scorers: what decoding needs of models.

A scorer has a batch of rows and their streaming state. `step` reads one token of each row and scores the next one;
`reorder` keeps, drops and repeats rows. An ensemble scores by the mean probability of its members.
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
    """log p(w) in row r is values[r, w] - normaliser[r]. values: (rows, V); normaliser: (rows,).

    Without a normaliser the values are logits, as a CPU gives them: `normalised` reads them for it, and beam search
    finds its candidates in the same reading.
    """

    values: Tensor
    normaliser: Tensor | None

    @classmethod
    def of(cls, logits: Tensor, temperature: float = 1.0) -> "TokenScores":
        values = logits.float() if temperature == 1 else logits.float() / temperature
        return cls(values, None if values.device.type == "cpu" else log_sum_exp(values))

    def normalised(self) -> tuple[Tensor, Tensor]:
        """Values and normaliser."""
        return self.values, log_sum_exp(self.values) if self.normaliser is None else self.normaliser

    def log_probabilities(self) -> Tensor:
        values, normaliser = self.normalised()
        return values - normaliser[:, None]


class Scorer(Protocol):
    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        """Reads `tokens` (rows,) and scores the next ones."""
        ...

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        """Continues with the rows `index`. contexts: see `StackState.reorder`."""
        ...

    @property
    def keeps_rows(self) -> bool:
        """Whether another number of rows is expensive, so that none should leave before half of them may."""
        ...


def rows_may_leave(scorer: "Scorer", left: int, rows: int) -> bool:
    """Returns whether `left` of all rows should go on alone."""
    return 2 * left <= rows if scorer.keeps_rows else left < rows


class StreamingScorer:
    """What scorers share that have one model and its streaming state."""

    state: StackState
    keeps_rows = False
    moved = False
    """Whether rows have been moved since the last step."""

    def read(self, tokens: Tensor, state: StackState, temperature: float) -> tuple[TokenScores, StackState]:
        """Reads `tokens` (rows,), and returns the scores of the next ones and the state after them."""
        raise NotImplementedError

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        scores, self.state = self.read(tokens, self.next_state(), temperature)
        return scores

    def next_state(self) -> StackState:
        """Returns the state for the next step, with room for its token.

        On the CPU a state whose rows moved makes room itself, or copies what grows anyway: room would be one copy more.
        """
        if self.moved and self.state.lengths.device.type == "cpu":
            self.moved = False
            return self.state
        return self.state.reserve(1)

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        self.state, self.moved = self.state.reorder(index, contexts), True


class Seq2SeqScorer(StreamingScorer):
    """Scores target tokens with an encoder-decoder, which encodes the sources once."""

    def __init__(self, model: Seq2Seq, source: Tensor, padding: Tensor | None) -> None:
        """source: (rows, time), each ending with eos. padding: (rows, time), True = ignore."""
        self.model = model
        self.context: Tensor | None = model.encode(source, padding).x
        self.padding = padding
        self.state: StackState = model.init_state(source.shape[0], source.device)

    def read(self, tokens: Tensor, state: StackState, temperature: float) -> tuple[TokenScores, StackState]:
        output = self.model.decode(tokens[:, None], self.context, context_padding=self.padding, state=state)
        assert output.state is not None
        self.context, self.padding = None, None  # the state has the context now
        return TokenScores.of(output.logits[:, 0], temperature), output.state


class LanguageModelScorer(StreamingScorer):
    """Scores continuations of texts with a language model."""

    def __init__(self, model: LanguageModel, state: StackState) -> None:
        """state: the one before the token that the first step reads."""
        self.model, self.state = model, state

    @classmethod
    def after(cls, model: LanguageModel, prompts: Tensor, padding: Tensor | None) -> "LanguageModelScorer":
        """Returns a scorer that has read `prompts` (rows, time), where time may be 0. padding: True = ignore."""
        state = model.init_state(prompts.shape[0], prompts.device)
        if prompts.shape[1]:
            read = model.features(prompts, padding, state).state
            assert read is not None
            state = read
        return cls(model, state)

    def read(self, tokens: Tensor, state: StackState, temperature: float) -> tuple[TokenScores, StackState]:
        output = self.model(tokens[:, None], state=state)
        assert output.state is not None
        return TokenScores.of(output.logits[:, 0], temperature), output.state


class Ensemble:
    """Scores by the mean probability of its members."""

    def __init__(self, members: Sequence[Scorer]) -> None:
        self.members = members

    @property
    def keeps_rows(self) -> bool:
        return any(member.keeps_rows for member in self.members)

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        each = [member.step(tokens, temperature).log_probabilities() for member in self.members]
        mean = torch.stack(each).logsumexp(0) - math.log(len(each))
        return TokenScores(mean, mean.new_zeros(mean.shape[0]))

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        for member in self.members:
            member.reorder(index, contexts)


def combine_scorers(scorers: Sequence[Scorer]) -> Scorer:
    """Returns one scorer for several: an ensemble, unless there is only one."""
    return scorers[0] if len(scorers) == 1 else Ensemble(scorers)
