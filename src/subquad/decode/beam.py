"""Beam search with the semantics of fairseq.

At each step the 2 * beam best continuations of a sentence's hypotheses are candidates. A candidate that ends counts
only if it is among the best `beam`; the best `beam` candidates that do not end are continued. A sentence is finished
when `beam` hypotheses have ended, or at its length limit, where every hypothesis must end. Finished sentences leave
the batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.decode.options import DecodeOptions
from subquad.decode.scoring import Scorer, TokenScores
from subquad.kernels.vocabulary import largest

LOG_ZERO = -float("inf")
"""The log-probability of what cannot happen."""


class Hypothesis(NamedTuple):
    """tokens: including eos. score: hypotheses are ranked by it. log_probabilities: one for each token."""

    tokens: list[int]
    score: float
    log_probabilities: list[float]


class SpecialTokens(NamedTuple):
    """The ids of the special tokens."""

    pad: int
    eos: int
    unk: int


@dataclass
class SearchRequest:
    """The inputs of a search for B sentences.

    first: (B,) the token that the first step reads. limits: (B,) the maximal number of tokens before eos. prefixes:
    (B, P) the tokens that hypotheses must begin with, followed by padding; None: there are no prefixes.
    """

    first: Tensor
    limits: Tensor
    prefixes: Tensor | None = None


def beam_search(
    scorer: Scorer, request: SearchRequest, options: DecodeOptions, special: SpecialTokens
) -> list[list[Hypothesis]]:
    """Returns the `nbest` best hypotheses of each sentence, best first. The scorer has one row for each sentence."""
    search = _Search(scorer, request, options, special)
    step = 0
    while len(search.sentences):
        search.step(step)
        step += 1
    ranked = [sorted(found, key=lambda one: -one.score) for found in search.finished]
    return [found[: options.nbest] for found in ranked]


class _Search:
    """The B sentences that are not finished, each with W hypotheses: one at first, then `beam`."""

    def __init__(self, scorer: Scorer, request: SearchRequest, options: DecodeOptions, special: SpecialTokens) -> None:
        self.scorer, self.options, self.special = scorer, options, special
        count, device = len(request.first), request.first.device
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.sentences = torch.arange(count, device=device)  # (B,) indices into the request
        self.limits, self.prefixes = request.limits.to(device), request.prefixes
        self.last = request.first
        self.tokens = torch.empty(count, 0, dtype=torch.int64, device=device)  # (B * W, steps)
        self.totals = torch.zeros(
            count, 1, device=device
        )  # (B * W, steps + 1): sums of log-probabilities, beginning with 0

    def step(self, step: int) -> None:
        scores = self.scorer.step(self.last, self.options.temperature)
        if not bool(torch.isfinite(scores.normaliser).all()):
            raise ValueError("the model's logits are not finite; its weights may be damaged")
        self._constrain(scores.values, step)
        totals, rows, tokens = self._candidates(scores)
        ends = (tokens == self.special.eos) & (totals > LOG_ZERO)
        self._collect_finished(ends[:, : self.options.beam], totals, rows, step)
        self._continue_search(ends, totals, rows, tokens, first=step == 0)

    def _width(self) -> int:
        return len(self.last) // len(self.sentences)

    def _constrain(self, values: Tensor, step: int) -> None:
        """Sets the scores of tokens that may not follow to -inf, in place. values: (B * W, V)."""
        eos, width = self.special.eos, self._width()
        values[:, self.special.pad] = LOG_ZERO
        if self.options.unk_penalty:
            values[:, self.special.unk] -= self.options.unk_penalty
        at_limit = self.limits <= step  # (B,)
        if step < self.options.min_len:
            values[(~at_limit).repeat_interleave(width), eos] = LOG_ZERO
        if at_limit.any():
            _force_token(values, at_limit.repeat_interleave(width), torch.full_like(self.last, eos))
        if self.prefixes is not None and step < self.prefixes.shape[1]:
            wanted = self.prefixes[:, step].repeat_interleave(width)
            _force_token(values, (wanted != self.special.pad) & ~at_limit.repeat_interleave(width), wanted)
        if self.options.no_repeat_ngram:
            self._forbid_repeats(values)

    def _forbid_repeats(self, values: Tensor) -> None:
        """Forbids every token that would repeat an n-gram of `no_repeat_ngram` tokens."""
        size = self.options.no_repeat_ngram
        for row, tokens in enumerate(self.tokens.tolist()):
            count = len(tokens) - size + 1
            if count > 0:
                end = tokens[count:]
                repeats = [tokens[i + size - 1] for i in range(count) if tokens[i : i + size - 1] == end]
                values[row, repeats] = LOG_ZERO

    def _candidates(self, scores: TokenScores) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the best continuations of each sentence: total log-probability, hypothesis and token, all (B, n)."""
        count, width, vocab = len(self.sentences), self._width(), scores.values.shape[1]
        values, tokens = largest(scores.values, min(2 * self.options.beam, vocab))
        # In the order of fairseq, the normaliser first: rounding must not make equal totals unequal.
        totals = (values - scores.normaliser[:, None] + self.totals[:, -1:]).view(count, -1)
        each = tokens.shape[1]
        totals, place = totals.topk(min(2 * self.options.beam, totals.shape[1]), -1)
        return totals, place // each, tokens.view(count, width * each).gather(1, place)

    def _collect_finished(self, ends: Tensor, totals: Tensor, rows: Tensor, step: int) -> None:
        """Stores the hypotheses that end. ends: (B, beam)."""
        width = self._width()
        length = (step + 1) ** self.options.lenpen
        for sentence, place in ends.nonzero().tolist():
            found = self.finished[int(self.sentences[sentence])]
            if len(found) < self.options.beam:
                row = sentence * width + int(rows[sentence, place])
                total = float(totals[sentence, place])
                sums = [*self.totals[row].tolist(), total]
                each = [after - before for before, after in itertools.pairwise(sums)]
                found.append(Hypothesis([*self.tokens[row].tolist(), self.special.eos], total / length, each))
        at_limit = (self.limits <= step).tolist()
        numbers = self.sentences.tolist()
        unfinished = [
            not late and len(self.finished[n]) < self.options.beam for n, late in zip(numbers, at_limit, strict=True)
        ]
        self.unfinished = torch.tensor(unfinished, device=self.last.device)

    def _continue_search(self, ends: Tensor, totals: Tensor, rows: Tensor, tokens: Tensor, first: bool) -> None:
        """Continues the best candidates that do not end, in the sentences that are not finished."""
        width, beam = self._width(), self.options.beam
        order = (ends.int() * ends.shape[1] + torch.arange(ends.shape[1], device=ends.device)).argsort(1)[:, :beam]
        kept = self.unfinished.nonzero().squeeze(1)
        order = order[kept]
        index = (kept[:, None] * width + rows[kept].gather(1, order)).flatten()
        self.last = tokens[kept].gather(1, order).flatten()
        self.tokens = torch.cat([self.tokens[index], self.last[:, None]], 1)
        self.totals = torch.cat([self.totals[index], totals[kept].gather(1, order).flatten()[:, None]], 1)
        changed = len(kept) < len(self.sentences)
        self.sentences, self.limits = self.sentences[kept], self.limits[kept]
        self.prefixes = self.prefixes[kept] if self.prefixes is not None else None
        if len(kept):
            self.scorer.reorder(index, kept if changed or first else None)


def _force_token(values: Tensor, rows: Tensor, token: Tensor) -> None:
    """Allows only `token` to follow in the rows where `rows` is True. values: (R, V); rows, token: (R,)."""
    chosen = rows.nonzero().squeeze(1)
    wanted = token[chosen]
    kept = values[chosen, wanted]
    values[chosen] = LOG_ZERO
    values[chosen, wanted] = kept


def special_tokens(tokenizer: object) -> SpecialTokens:
    """Returns the special tokens of a tokenizer."""
    return SpecialTokens(*(int(getattr(tokenizer, name)) for name in SpecialTokens._fields))


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Returns rows of different lengths as one tensor (rows, longest), and its padding."""
    longest = max(map(len, rows), default=0)
    tokens = torch.full((len(rows), longest), pad, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(longest) >= lengths[:, None]
