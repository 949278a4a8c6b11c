"""Samples tokens one by one. Every text has its own random generator, so it does not depend on other texts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.decode.beam import SpecialTokens, steps_between_checks
from subquad.decode.hypotheses import LOG_ZERO, Hypothesis
from subquad.decode.options import SampleOptions
from subquad.decode.scoring import Scorer, rows_may_leave
from subquad.kernels.vocabulary import largest

DRAWS_AHEAD = 64
"""For so many steps random numbers are drawn at a time: a draw of one takes as long as that of many."""


def sample(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    limit: int,
    options: SampleOptions,
    special: SpecialTokens,
    device: torch.device | str = "cpu",
) -> list[Hypothesis]:
    """Samples at most `limit` tokens after each prompt, of which the scorer has read all tokens but the last.

    log_probabilities are the model's own: penalty, temperature, top_k and top_p do not change them. device: the
    scorer's; draws are made on the CPU, so that they are the same on every device.
    """
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    rows = list(range(len(prompts)))  # those that have not ended
    every = steps_between_checks(torch.device(device))
    last = torch.tensor([tokens[-1] for tokens in prompts], device=device)
    draws = _Draws(options.seed, len(prompts), device) if options.temperature else None
    penalty = _RepetitionPenalty(prompts, options.repetition_penalty, device)
    unread: list[Tensor] = []  # tokens and log-probabilities (2, rows) of steps that Python has not looked at
    for step in range(limit):
        if not rows:
            break
        scores, normaliser = scorer.step(last).normalised()
        values = penalty.applied(scores)
        values[:, special.pad] = LOG_ZERO
        last = _sample_tokens(values, options, draws.next() if draws is not None else None)
        penalty.add(last)
        logs = scores.gather(1, last[:, None]).squeeze(1) - normaliser
        unread.append(torch.stack([last.double(), logs.double()]))
        if (step + 1) % every and step + 1 < limit:
            continue
        steps = torch.stack(unread, -1).tolist()  # here, and only here, Python waits for the device
        unread.clear()
        stay = [place for place, row in enumerate(rows) if _extend(found[row], steps, place, special.eos)]
        if rows_may_leave(scorer, len(stay), len(rows)):
            rows = [rows[place] for place in stay]
            kept = torch.tensor(stay, dtype=torch.int64, device=device)
            last = last[kept]
            penalty.reorder(kept)
            if draws is not None:
                draws.reorder(kept, rows)
            if rows:
                scorer.reorder(kept)
    return [Hypothesis(tokens, sum(logs), logs) for tokens, logs in found]


def _extend(
    found: tuple[list[int], list[float]], steps: Sequence[Sequence[Sequence[float]]], row: int, eos: int
) -> bool:
    """Appends the tokens of a row up to eos, and their log-probabilities; returns whether it goes on."""
    if found[0][-1:] == [eos]:
        return False
    for token, log in zip(steps[0][row], steps[1][row], strict=True):
        found[0].append(int(token))
        found[1].append(log)
        if token == eos:
            return False
    return True


class _Draws:
    """Random numbers in [0, 1), one of each row for each step, made ahead for many steps."""

    def __init__(self, seed: int, count: int, device: torch.device | str) -> None:
        self.generators = [torch.Generator().manual_seed(seed + 1_000_003 * row) for row in range(count)]
        self.device, self.rows, self.used = device, list(range(count)), 0
        self.numbers = torch.empty(count, 0, device=device)

    def next(self) -> Tensor:
        """Returns one number of each row, (rows,)."""
        if self.used == self.numbers.shape[1]:
            made = [torch.rand(DRAWS_AHEAD, generator=self.generators[row]) for row in self.rows]
            self.numbers, self.used = torch.stack(made).to(self.device), 0
        self.used += 1
        return self.numbers[:, self.used - 1]

    def reorder(self, index: Tensor, rows: list[int]) -> None:
        self.numbers, self.rows = self.numbers[index], rows


class _RepetitionPenalty:
    """Makes tokens that occur in a text less probable."""

    def __init__(self, texts: Sequence[Sequence[int]], penalty: float, device: torch.device | str) -> None:
        self.penalty = penalty
        self.given = [torch.tensor(sorted(set(text)), device=device) for text in texts] if penalty != 1 else []
        self.seen: Tensor | None = None  # (rows, V) bool

    def applied(self, values: Tensor) -> Tensor:
        """Returns the scores (rows, V) with those of tokens that occur in the text of their row changed."""
        if self.penalty == 1:
            return values
        if self.seen is None:
            self.seen = torch.zeros_like(values, dtype=torch.bool)
            for row, tokens in enumerate(self.given):
                self.seen[row].index_fill_(0, tokens, True)
        changed = torch.where(values > 0, values / self.penalty, values * self.penalty)
        return torch.where(self.seen, changed, values)

    def add(self, tokens: Tensor) -> None:
        """Adds a token (rows,) to each text."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)

    def reorder(self, index: Tensor) -> None:
        self.seen = self.seen[index] if self.seen is not None else None


def _sample_tokens(values: Tensor, options: SampleOptions, draws: Tensor | None) -> Tensor:
    """Samples one token of each row of logits (rows, V): (rows,). draws: (rows,) in [0, 1); None: the best token."""
    if draws is None:
        return largest(values, 1)[1].squeeze(1)
    size = min(options.top_k, values.shape[1]) if options.top_k else values.shape[1]
    kept, tokens = largest(values / options.temperature, size)
    sums = kept.softmax(-1).cumsum(-1)
    if options.top_p < 1:
        # up to and including the token at which the sum reaches p
        sums = torch.where(sums - kept.softmax(-1) < options.top_p, sums, sums.new_zeros(()))
        sums = sums.cummax(-1).values
    place = (sums < draws[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
    return tokens.gather(1, place.clamp(max=size - 1)).squeeze(1)
