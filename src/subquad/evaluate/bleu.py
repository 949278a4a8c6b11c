"""BLEU and chrF of translations, by sacrebleu, with its signatures.

    bleu           detokenised text, cased, tokenised by sacrebleu (13a): what papers should report
    chrf           character n-grams of the same text
    word_bleu      text whose words are between spaces already, unsmoothed: what multi-bleu and fairseq compute
    compound_bleu  the same with compounds split at their dashes, as older English-German papers did
    token_bleu     the same on token numbers, as fairseq's scorer

References are one text for each hypothesis, or several streams of one text for each. Anything else is an error: a list
of one-line lists would score the first sentence against all references, which looks like a good result.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.fairseq import MosesTokenizer, WordTokenizer
from subquad.evaluate.measure import Measure

References = Sequence[str] | Sequence[Sequence[str]]
NEVER_MATCHES = "<reference-unk>"  # no hypothesis holds it: those are numbers


def bleu(hypotheses: Sequence[str], references: References, tokenize: str = "13a") -> Measure:
    """BLEU of detokenised text, 0 to 100."""
    return _measure(BLEU(tokenize=tokenize), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: References) -> Measure:
    """chrF2 of detokenised text, 0 to 100."""
    return _measure(CHRF(), hypotheses, references)


def word_bleu(hypotheses: Sequence[str], references: References) -> Measure:
    """BLEU of words between spaces, 0 to 100, unsmoothed: without a common 4-gram it is 0."""
    return _measure(BLEU(tokenize="none", smooth_method="none", force=True), hypotheses, references)


def compound_bleu(hypotheses: Sequence[str], references: References) -> Measure:
    """`word_bleu` after `split_compounds` on both sides."""
    streams = [[split_compounds(text) for text in stream] for stream in reference_streams(hypotheses, references)]
    found = word_bleu([split_compounds(text) for text in hypotheses], streams)
    return Measure(found.statistics, found.score, f"{found.signature}|compounds:split")


def word_splitter(tokenizer: Tokenizer) -> tuple[str, Callable[[str], str]]:
    """How text gets spaces between its words for `word_bleu`, by name and as a function.

    A tokenizer of words does it itself (moses, or spaces that are there already); otherwise it is sacrebleu's 13a.
    """
    if not isinstance(tokenizer, WordTokenizer):
        return "13a", Tokenizer13a()
    language = tokenizer.language if isinstance(tokenizer, MosesTokenizer) else None
    return f"moses-{language}" if language is not None else "spaces", tokenizer.split_words


def split_compounds(text: str) -> str:
    """`low-cost` as `low ##AT##-##AT## cost`: a dash between two characters becomes a word of its own."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def token_bleu(
    hypotheses: Sequence[Iterable[int]], references: Sequence[Iterable[int]], *, pad: int, eos: int, unk: int
) -> Measure:
    """`word_bleu` of token numbers, without padding and eos around a sentence; unk in a reference never matches."""
    said = [" ".join(map(str, _strip_special(tokens, pad, eos))) for tokens in hypotheses]
    asked = [
        " ".join(NEVER_MATCHES if token == unk else str(token) for token in _strip_special(tokens, pad, eos))
        for tokens in references
    ]
    return word_bleu(said, asked)


def _strip_special(tokens: Iterable[int], pad: int, eos: int) -> list[int]:
    kept = [int(token) for token in tokens]
    while kept and kept[-1] in (pad, eos):
        kept.pop()
    first = next((place for place, token in enumerate(kept) if token != pad), len(kept))
    return kept[first:]


def reference_streams(hypotheses: Sequence[str], references: References) -> list[Sequence[str]]:
    """References as streams of one text for each hypothesis; a ValueError says which shape was given instead."""
    _check_texts(hypotheses, "hypotheses")
    if not len(hypotheses):
        raise ValueError("there are no hypotheses to score")
    if isinstance(references, str) or not len(references):
        raise ValueError("references are a list: one text for each hypothesis, or several such lists")
    first = references[0]
    streams: list[Any] = [references] if isinstance(first, str) else list(references)
    for number, stream in enumerate(streams, 1):
        name = "references" if len(streams) == 1 else f"reference stream {number}"
        _check_texts(stream, name)
        if len(stream) != len(hypotheses):
            raise ValueError(
                f"{len(hypotheses):,} hypotheses, but {name} of {len(streams):,} has {len(stream):,} line(s): give one "
                "list with a reference for each hypothesis, or one such list for each set of references"
            )
    return streams


def _check_texts(texts: Any, name: str) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ValueError(f"{name} are a list of texts, not {type(texts).__name__}")
    for place, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"{name}, line {place}: a text is needed, got {type(text).__name__}")


def _measure(metric: BLEU | CHRF, hypotheses: Sequence[str], references: References) -> Measure:
    streams = reference_streams(hypotheses, references)
    # The two methods behind sacrebleu's own bootstrap: statistics of each sentence, and the score of their sum.
    statistics = np.array(metric._extract_corpus_statistics(hypotheses, streams), np.float64)
    return Measure(statistics, functools.partial(_score, metric), str(metric.get_signature()))


def bleu_score(sums: np.ndarray) -> float:
    """The score of `bleu` from sums of its statistics."""
    return _score(_plain_bleu(), sums)


@functools.cache
def _plain_bleu() -> BLEU:
    return BLEU()


def _score(metric: BLEU | CHRF, sums: np.ndarray) -> float:
    return float(metric._compute_score_from_stats(sums.round().astype(np.int64).tolist()).score)
