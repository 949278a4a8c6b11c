"""The hypotheses of a beam search: what each step chose, which of them ended, and their tokens, traced back.

Everything that a step writes stays on the device of the scores; nothing waits for it. Only `best`, at the end of the
search, reads it, in one copy.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LOG_ZERO = -float("inf")
"""The log-probability of what cannot happen."""


class Hypothesis(NamedTuple):
    """tokens: including eos. score: hypotheses are ranked by it. log_probabilities: one for each token."""

    tokens: list[int]
    score: float
    log_probabilities: list[float]


class Hypotheses:
    """All hypotheses of B sentences, at most `beam` of a sentence at a time.

    Step t continues hypothesis parents[t, b, i] of sentence b with a token, to the sum totals[t, b, i] of
    log-probabilities; both integers are one, `token * beam + parent`. A hypothesis that ends at step t keeps t and its
    parent as `t * beam + parent`.
    """

    def __init__(self, sentences: int, beam: int, device: torch.device) -> None:
        self.sentences, self.beam = sentences, beam
        self.choices = torch.empty(0, sentences, beam, dtype=torch.int64, device=device)
        self.totals = torch.empty(0, sentences, beam, device=device)
        # one place more than a sentence has: it takes what is not kept
        self.ends = torch.full((sentences, beam + 1), -1, dtype=torch.int64, device=device)
        self.end_totals = torch.full((sentences, beam + 1), LOG_ZERO, device=device)
        self.steps = 0

    def extend(self, sentences: Tensor, parents: Tensor, tokens: Tensor, totals: Tensor) -> None:
        """Adds a step. sentences: (n,) to which the others, (n, up to beam) each, belong."""
        if self.steps == len(self.choices):
            room = torch.Size((max(64, self.steps), self.sentences, self.beam))
            self.choices = torch.cat([self.choices, self.choices.new_zeros(room)])
            self.totals = torch.cat([self.totals, self.totals.new_zeros(room)])
        width = tokens.shape[1]
        self.choices[self.steps, :, :width].index_copy_(0, sentences, tokens * self.beam + parents)
        self.totals[self.steps, :, :width].index_copy_(0, sentences, totals)
        self.steps += 1

    def end(self, sentences: Tensor, counts: Tensor, ends: Tensor, parents: Tensor, totals: Tensor) -> Tensor:
        """Keeps the hypotheses that end at this step, which `extend` has not been told yet.

        counts: (n,) how many ended before; returns how many have ended now, at most `beam`. ends: (n, up to beam)
        bool, in the order in which they are kept; parents, totals: of the same shape.
        """
        beam = self.beam
        after = counts[:, None] + ends.cumsum(1)
        place = torch.where(ends, after - 1, beam).clamp(max=beam)
        index = (sentences[:, None] * (beam + 1) + place).flatten()
        self.ends.view(-1).scatter_(0, index, (parents + self.steps * beam).flatten())
        self.end_totals.view(-1).scatter_(0, index, totals.flatten())
        return after[:, -1].clamp(max=beam)

    def best(self, count: int, lenpen: float, eos: int) -> list[list[Hypothesis]]:
        """Returns the `count` best hypotheses of each sentence, the best first; of equal ones that which ended first.

        The score of a hypothesis is its total / length^lenpen, where the length includes eos.
        """
        ends = self.ends[:, :-1].cpu().numpy()
        totals = self.end_totals[:, :-1].double().cpu().numpy()
        lengths = np.array([(step + 1) ** lenpen for step in range(self.steps + 1)], np.float64)
        scores = np.where(ends >= 0, totals / lengths[ends // self.beam], LOG_ZERO)
        order = np.argsort(-scores, 1, kind="stable")[:, :count]
        sentence, rank = np.nonzero(np.take_along_axis(ends, order, 1) >= 0)
        place = order[sentence, rank]
        tokens, sums, steps = self._trace(sentence, ends[sentence, place])
        found: list[list[Hypothesis]] = [[] for _ in range(self.sentences)]
        for row, number in enumerate(sentence.tolist()):
            length = int(steps[row])
            each = np.diff([0.0, *sums[row, :length], totals[number, place[row]]])
            score = float(scores[number, place[row]])
            found[number].append(Hypothesis([*tokens[row, :length].tolist(), eos], score, each.tolist()))
        return found

    def _trace(self, sentence: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens (n, steps), sums of log-probabilities (n, steps) and the steps (n,) before n ends."""
        choices = self.choices[: self.steps].cpu().numpy()
        totals = self.totals[: self.steps].double().cpu().numpy()
        steps, parent = ends // self.beam, ends % self.beam
        tokens, sums = np.zeros((len(ends), self.steps), np.int64), np.zeros((len(ends), self.steps))
        for step in reversed(range(self.steps)):
            (rows,) = np.nonzero(steps > step)
            at = step, sentence[rows], parent[rows]
            tokens[rows, step], sums[rows, step] = choices[at] // self.beam, totals[at]
            parent[rows] = choices[at] % self.beam
        return tokens, sums, steps
