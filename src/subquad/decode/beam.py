"""Beam search with the semantics of fairseq.

At each step the 2 * beam best continuations of a sentence's hypotheses are candidates. A candidate that ends counts
only if it is among the best `beam`; the best `beam` candidates that do not end are continued. A sentence is finished
when `beam` hypotheses have ended, or at its length limit, where every hypothesis must end.

Finished sentences leave the batch: at once on the CPU, after at most STEPS_UNWATCHED steps on other devices, which
compute while Python prepares the next steps and would have to be waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.decode.hypotheses import LOG_ZERO, Hypotheses, Hypothesis
from subquad.decode.options import DecodeOptions
from subquad.decode.scoring import Scorer, TokenScores, rows_may_leave
from subquad.kernels.vocabulary import largest, normalised_largest

STEPS_UNWATCHED = 8
"""After so many steps a device other than the CPU is asked which sentences are finished."""


class SpecialTokens(NamedTuple):
    """The ids of the special tokens."""

    pad: int
    eos: int
    unk: int


@dataclass
class SearchRequest:
    """The inputs of a search for B sentences.

    first: (B,) the token that the first step reads. limits: (B,) the maximal number of tokens before eos, on the CPU.
    prefixes: (B, P) the tokens that hypotheses must begin with, followed by padding; None: there are no prefixes.
    """

    first: Tensor
    limits: Tensor
    prefixes: Tensor | None = None


def beam_search(
    scorer: Scorer, request: SearchRequest, options: DecodeOptions, special: SpecialTokens
) -> list[list[Hypothesis]]:
    """Returns the `nbest` best hypotheses of each sentence, best first. The scorer has one row for each sentence."""
    search = _Search(scorer, request, options, special)
    while len(search.sentences):
        search.step()
    search.check_finite()
    return search.hypotheses.best(options.nbest, options.lenpen, special.eos)


def steps_between_checks(device: torch.device) -> int:
    """Returns how often finished sentences are looked for: reading from a device means to wait for it."""
    return 1 if device.type == "cpu" else STEPS_UNWATCHED


class _Search:
    """The B sentences that are in the batch, each with W hypotheses: one at first, then `beam`."""

    def __init__(self, scorer: Scorer, request: SearchRequest, options: DecodeOptions, special: SpecialTokens) -> None:
        self.scorer, self.options, self.special = scorer, options, special
        count, device = len(request.first), request.first.device
        self.hypotheses = Hypotheses(count, options.beam, device)
        self.check_every = steps_between_checks(device)
        self.known_limits: list[int] = request.limits.tolist()  # what Python knows without asking the device
        self.sentences = torch.arange(count, device=device)  # (B,) indices into the request
        self.limits, self.prefixes = request.limits.to(device), request.prefixes
        self.ended = torch.zeros(count, dtype=torch.int64, device=device)  # (B,) hypotheses that have ended
        self.unfinished = torch.ones(count, dtype=torch.bool, device=device)  # (B,)
        self.finite = torch.ones((), dtype=torch.bool, device=device)  # whether all scores were
        self.last = request.first  # (B * W,)
        self.totals = torch.zeros(count, device=device)  # (B * W,) sums of log-probabilities
        self.tokens = torch.empty(count, 0, dtype=torch.int64, device=device)  # (B * W, steps), if n-grams are counted

    def step(self) -> None:
        step = self.hypotheses.steps
        scores = self.scorer.step(self.last, self.options.temperature)
        totals, parents, tokens = self._candidates(scores, step)
        ends = (tokens == self.special.eos) & (totals > LOG_ZERO)
        self._collect_finished(ends, totals, parents, step)
        self._continue_search(ends, totals, parents, tokens)

    def _width(self) -> int:
        return len(self.last) // len(self.sentences)

    def check_finite(self) -> None:
        if not bool(self.finite):
            raise ValueError("the model's logits are not finite; its weights may be damaged")

    def _note_finite(self, normaliser: Tensor) -> None:
        self.finite = self.finite & torch.isfinite(normaliser).all()
        if self.check_every == 1:
            self.check_finite()

    # ------------------------------------------------------------------ what may follow

    def _has_constraints(self, step: int) -> bool:
        """Whether `_constrain` does more than to keep padding from following."""
        options = self.options
        is_early = step < options.min_len or (self.prefixes is not None and step < self.prefixes.shape[1])
        return bool(options.unk_penalty or options.no_repeat_ngram or is_early or step >= min(self.known_limits))

    def _constrain(self, values: Tensor, step: int) -> None:
        """Sets the scores of tokens that may not follow to -inf, in place. values: (B * W, V)."""
        eos, width = self.special.eos, self._width()
        values[:, self.special.pad] = LOG_ZERO
        if self.options.unk_penalty:
            values[:, self.special.unk] -= self.options.unk_penalty
        at_limit = (self.limits <= step).repeat_interleave(width)  # (B * W,)
        if step < self.options.min_len:
            values[:, eos].masked_fill_(~at_limit, LOG_ZERO)
        if step >= min(self.known_limits):
            _force_token(values, at_limit, torch.full_like(self.last, eos))
        if self.prefixes is not None and step < self.prefixes.shape[1]:
            wanted = self.prefixes[:, step].repeat_interleave(width)
            _force_token(values, (wanted != self.special.pad) & ~at_limit, wanted)
        if self.options.no_repeat_ngram:
            self._forbid_repeats(values)

    def _forbid_repeats(self, values: Tensor) -> None:
        """Forbids every token that would repeat an n-gram of `no_repeat_ngram` tokens."""
        size = self.options.no_repeat_ngram
        if self.tokens.shape[1] >= size:
            ngrams = self.tokens.unfold(1, size, 1)  # (B * W, n-grams, size)
            end = self.tokens[:, self.tokens.shape[1] - size + 1 :]
            repeats = (ngrams[..., :-1] == end[:, None]).all(-1)
            # where nothing repeats, what is forbidden is padding, which never follows
            values.scatter_(1, torch.where(repeats, ngrams[..., -1], self.special.pad), LOG_ZERO)

    # ------------------------------------------------------------------ what follows

    def _candidates(self, scores: TokenScores, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the best continuations of each sentence: total log-probability, hypothesis and token, all (B, n)."""
        count, width, vocab = len(self.sentences), self._width(), scores.values.shape[1]
        each = min(2 * self.options.beam, vocab)
        if scores.normaliser is None and each < vocab and not self._has_constraints(step):
            normaliser, values, tokens = normalised_largest(scores.values, each, self.special.pad)
            self._note_finite(normaliser)
        else:
            logits, normaliser = scores.normalised()
            self._note_finite(normaliser)
            self._constrain(logits, step)
            values, tokens = largest(logits, each)
        # In the order of fairseq, the normaliser first: rounding must not make equal totals unequal.
        totals = (values - normaliser[:, None] + self.totals[:, None]).view(count, -1)
        totals, place = totals.topk(min(2 * self.options.beam, totals.shape[1]), -1)
        return totals, place // each, tokens.view(count, width * each).gather(1, place)

    def _collect_finished(self, ends: Tensor, totals: Tensor, parents: Tensor, step: int) -> None:
        """Keeps the hypotheses that end among the best `beam` candidates."""
        beam = self.options.beam
        counted = ends[:, :beam] & self.unfinished[:, None]
        if self.check_every > 1 or bool(counted.any()):
            given = parents[:, :beam], totals[:, :beam]
            self.ended = self.hypotheses.end(self.sentences, self.ended, counted, *given)
            self.unfinished = self.unfinished & (self.ended < beam)
        if step >= min(self.known_limits):
            self.unfinished = self.unfinished & (self.limits > step)

    def _continue_search(self, ends: Tensor, totals: Tensor, parents: Tensor, tokens: Tensor) -> None:
        """Continues the best candidates that do not end."""
        step, width, beam = self.hypotheses.steps, self._width(), self.options.beam
        count, candidates = ends.shape
        if candidates < 2 * beam:  # with so few words, what has ended may have to fill the beam: it cannot win again
            totals = totals.masked_fill(ends, LOG_ZERO)
        order = (ends.int() * candidates + torch.arange(candidates, device=ends.device)).argsort(1)[:, :beam]
        parents, tokens, totals = parents.gather(1, order), tokens.gather(1, order), totals.gather(1, order)
        self.hypotheses.extend(self.sentences, parents, tokens, totals)
        index = parents + torch.arange(0, count * width, width, device=ends.device)[:, None]  # (B, beam) rows of before
        kept = self._choose_sentences(step)
        if kept is not None:
            index, tokens, totals = index[kept], tokens[kept], totals[kept]
        self.last, self.totals, index = tokens.flatten(), totals.flatten(), index.flatten()
        if self.options.no_repeat_ngram:
            self.tokens = torch.cat([self.tokens[index], self.last[:, None]], 1)
        if len(index) and (kept is not None or beam > 1):  # a single hypothesis goes on in its own row
            everyone = torch.arange(count, device=ends.device) if step == 0 else None
            self.scorer.reorder(index, everyone if kept is None else kept)

    def _choose_sentences(self, step: int) -> Tensor | None:
        """Lets finished sentences leave. Returns the places (n,) of those that stay; None: everyone stays."""
        if step >= max(self.known_limits):
            unfinished = [False] * len(self.known_limits)
        elif (step + 1) % self.check_every:
            return None
        else:  # here, and only here, Python waits for the device
            unfinished = (self.unfinished & self.finite).tolist()
        if not rows_may_leave(self.scorer, sum(unfinished), len(unfinished)):
            return None
        self.known_limits = [limit for limit, stays in zip(self.known_limits, unfinished, strict=True) if stays]
        kept = self.unfinished.int().argsort(descending=True, stable=True)[: len(self.known_limits)]
        self.sentences, self.limits = self.sentences[kept], self.limits[kept]
        self.ended, self.unfinished = self.ended[kept], self.unfinished[kept]
        self.prefixes = self.prefixes[kept] if self.prefixes is not None else None
        return kept


def _force_token(values: Tensor, rows: Tensor, token: Tensor) -> None:
    """Allows only `token` to follow in the rows where `rows` is True. values: (R, V); rows, token: (R,)."""
    place = token[:, None]
    wanted = values.gather(1, place)
    values.masked_fill_(rows[:, None], LOG_ZERO)
    values.scatter_(1, place, torch.where(rows[:, None], wanted, values.gather(1, place)))


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
