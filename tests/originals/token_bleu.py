"""BLEU of token ids, as fairseq's scorer computes it: `word_bleu` with ids as words."""

from collections.abc import Iterable, Sequence

from subquad.evaluate.bleu_and_chrf import word_bleu
from subquad.evaluate.measure import Measure

NEVER_MATCHES = "<reference-unk>"  # no hypothesis contains it, because their words are numbers


def token_bleu(
    hypotheses: Sequence[Iterable[int]], references: Sequence[Iterable[int]], *, pad: int, eos: int, unk: int
) -> Measure:
    """Returns `word_bleu` of token ids without padding and eos. unk in a reference never matches."""
    hypothesis_words = [" ".join(map(str, _strip_special(tokens, pad, eos))) for tokens in hypotheses]
    reference_words = [
        " ".join(NEVER_MATCHES if token == unk else str(token) for token in _strip_special(tokens, pad, eos))
        for tokens in references
    ]
    return word_bleu(hypothesis_words, reference_words)


def _strip_special(tokens: Iterable[int], pad: int, eos: int) -> list[int]:
    kept = [int(token) for token in tokens]
    while kept and kept[-1] in (pad, eos):
        kept.pop()
    first = next((place for place, token in enumerate(kept) if token != pad), len(kept))
    return kept[first:]
