"""Beam search of one sentence in plain Python: the definition that `subquad.decode.beam` is held against.

Only the choice among scores is torch's, row by row, so that equal scores are ordered alike.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subquad.decode.beam import SpecialTokens
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions
from subquad.kernels.vocabulary import largest, log_sum_exp

NEVER = -float("inf")


def search_one(
    logits: Callable[[Sequence[int]], Tensor],
    limit: int,
    options: DecodeOptions,
    special: SpecialTokens,
    prefix: Sequence[int] = (),
) -> list[Hypothesis]:
    """Returns the best hypotheses. logits: (V,) of the next token after the tokens so far."""
    going: list[tuple[list[int], list[float]]] = [([], [0.0])]  # tokens, and sums of log-probabilities
    ended: list[Hypothesis] = []
    for step in range(limit + 1):
        scores: list[Tensor] = []
        words: list[Tensor] = []
        for tokens, sums in going:
            values = logits(tokens)[None] / options.temperature
            total = log_sum_exp(values)
            _constrain(values[0], tokens, limit, options, special, prefix)
            best, places = largest(values, min(2 * options.beam, values.shape[1]))
            scores.append(best[0] - total + torch.tensor(sums[-1]))
            words.append(places[0])
        size = len(words[0])
        found, place = torch.cat(scores).topk(min(2 * options.beam, len(going) * size))
        candidates = [
            (score, at // size, int(words[at // size][at % size]))
            for score, at in zip(found.tolist(), place.tolist(), strict=True)
        ]
        later = []
        for rank, (score, parent, word) in enumerate(candidates):
            tokens, sums = going[parent]
            if word != special.eos or score == NEVER:
                later.append(([*tokens, word], [*sums, score]))
            elif rank < options.beam and len(ended) < options.beam:
                steps = [b - a for a, b in zip(sums, [*sums[1:], score], strict=True)]
                ended.append(Hypothesis([*tokens, word], score / (step + 1) ** options.lenpen, steps))
        if len(ended) == options.beam:
            break
        going = later[: options.beam]
    return sorted(ended, key=lambda one: -one.score)[: options.nbest]


def _constrain(
    values: Tensor,
    tokens: Sequence[int],
    limit: int,
    options: DecodeOptions,
    special: SpecialTokens,
    prefix: Sequence[int],
) -> None:
    """Sets the scores (V,) of tokens that may not follow to -inf, in place."""
    step, eos = len(tokens), special.eos
    values[special.pad] = NEVER
    values[special.unk] -= options.unk_penalty
    if step == limit:
        values[[word for word in range(len(values)) if word != eos]] = NEVER
    else:
        if step < options.min_len:
            values[eos] = NEVER
        if step < len(prefix):
            values[[word for word in range(len(values)) if word != prefix[step]]] = NEVER
    size = options.no_repeat_ngram
    if size:
        ngrams = [tuple(tokens[at : at + size]) for at in range(step - size + 1)]
        end = tuple(tokens[step - size + 1 :])
        for *start, word in ngrams:
            if tuple(start) == end:
                values[word] = NEVER
