"""Samples tokens one by one. Every text has its own random generator, so it does not depend on other texts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.decode.beam import SpecialTokens
from subquad.decode.hypotheses import LOG_ZERO, Hypothesis
from subquad.decode.options import SampleOptions
from subquad.decode.scoring import Scorer
from subquad.kernels.vocabulary import largest


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
    generators = [torch.Generator().manual_seed(options.seed + 1_000_003 * row) for row in range(len(prompts))]
    texts = [list(tokens) for tokens in prompts]
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    rows = list(range(len(prompts)))  # those that have not ended
    for _ in range(limit):
        if not rows:
            break
        scores = scorer.step(torch.tensor([texts[row][-1] for row in rows], device=device))
        values = scores.values.clone()
        values[:, special.pad] = LOG_ZERO
        _penalise_repeats(values, [texts[row] for row in rows], options.repetition_penalty)
        chosen = _sample_tokens(values, options, [generators[row] for row in rows])
        logs = scores.values.gather(1, chosen[:, None]).squeeze(1) - scores.normaliser
        tokens = chosen.tolist()
        for row, token, log in zip(rows, tokens, logs.tolist(), strict=True):
            texts[row].append(token)
            found[row][0].append(token)
            found[row][1].append(log)
        stay = [place for place, token in enumerate(tokens) if token != special.eos]
        if len(stay) < len(rows):
            rows = [rows[place] for place in stay]
            if rows:
                scorer.reorder(torch.tensor(stay, device=device))
    return [Hypothesis(tokens, sum(logs), logs) for tokens, logs in found]


def _penalise_repeats(values: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> None:
    """Makes tokens that occur in a text less probable, in place."""
    if penalty == 1:
        return
    for row, text in enumerate(texts):
        tokens = torch.tensor(sorted(set(text)), device=values.device)
        old = values[row, tokens]
        values[row, tokens] = torch.where(old > 0, old / penalty, old * penalty)


def _sample_tokens(values: Tensor, options: SampleOptions, generators: Sequence[torch.Generator]) -> Tensor:
    """Samples one token of each row of logits (rows, V): (rows,)."""
    if options.temperature == 0:
        return largest(values, 1)[1].squeeze(1)
    size = min(options.top_k, values.shape[1]) if options.top_k else values.shape[1]
    kept, tokens = largest(values / options.temperature, size)
    sums = kept.softmax(-1).cumsum(-1)
    if options.top_p < 1:
        # up to and including the token at which the sum reaches p
        sums = torch.where(sums - kept.softmax(-1) < options.top_p, sums, sums.new_zeros(()))
        sums = sums.cummax(-1).values
    draws = torch.stack([torch.rand((), generator=generator) for generator in generators]).to(values.device)
    place = (sums < draws[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
    return tokens.gather(1, place.clamp(max=size - 1)).squeeze(1)
