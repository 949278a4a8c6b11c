"""Drawing tokens one by one. Every row draws from a generator of its own, so its text does not depend on the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.decode.beam import LOG_ZERO, Hypothesis, SpecialTokens
from subquad.decode.options import SampleOptions
from subquad.decode.scoring import Scorer
from subquad.kernels.vocabulary import largest


def sample(
    scorer: Scorer, said: Sequence[Sequence[int]], limit: int, options: SampleOptions, symbols: SpecialTokens
) -> list[Hypothesis]:
    """At most `limit` tokens after each text `said`, of whose tokens the scorer has read all but the last.

    log_probabilities are the model's own: penalties, temperature and truncation change what is drawn, not them.
    """
    device = torch.device("cpu")  # draws are the same on every device
    generators = [torch.Generator(device).manual_seed(options.seed + 1_000_003 * row) for row in range(len(said))]
    texts = [list(tokens) for tokens in said]
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in said]
    rows = list(range(len(said)))  # those that go on
    for _ in range(limit):
        if not rows:
            break
        scores = scorer.step(torch.tensor([texts[row][-1] for row in rows]))
        values = scores.values.clone()
        values[:, symbols.pad] = LOG_ZERO
        _penalise_repeats(values, [texts[row] for row in rows], options.repetition_penalty)
        tokens = _sample_tokens(values, options, [generators[row] for row in rows]).tolist()
        logs = scores.values[range(len(rows)), tokens] - scores.normaliser
        for row, token, log in zip(rows, tokens, logs.tolist(), strict=True):
            texts[row].append(token)
            found[row][0].append(token)
            found[row][1].append(log)
        stay = [place for place, token in enumerate(tokens) if token != symbols.eos]
        if len(stay) < len(rows):
            rows = [rows[place] for place in stay]
            if rows:
                scorer.reorder(torch.tensor(stay))
    return [Hypothesis(tokens, sum(logs), logs) for tokens, logs in found]


def _penalise_repeats(values: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> None:
    """Makes tokens that were said less likely, in place."""
    if penalty == 1:
        return
    for row, text in enumerate(texts):
        tokens = torch.tensor(sorted(set(text)))
        said = values[row, tokens]
        values[row, tokens] = torch.where(said > 0, said / penalty, said * penalty)


def _sample_tokens(values: Tensor, options: SampleOptions, generators: Sequence[torch.Generator]) -> Tensor:
    """One token of each row of logits (rows, V): (rows,)."""
    if options.temperature == 0:
        return largest(values, 1)[1].squeeze(1)
    size = min(options.top_k, values.shape[1]) if options.top_k else values.shape[1]
    kept, tokens = largest(values / options.temperature, size)
    sums = kept.softmax(-1).cumsum(-1)
    if options.top_p < 1:
        # up to and with the token at which the sum reaches p
        sums = torch.where(sums - kept.softmax(-1) < options.top_p, sums, sums.new_zeros(()))
        sums = sums.cummax(-1).values
    draws = torch.stack([torch.rand((), generator=generator) for generator in generators]).to(values.device)
    place = (sums < draws[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
    return tokens.gather(1, place.clamp(max=size - 1)).squeeze(1)
