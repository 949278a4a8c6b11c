"""BLEU and chrF of translations, computed by sacrebleu, with its signatures.

    bleu           of detokenised, cased text, which sacrebleu tokenises (13a): what papers should report
    chrf           of character n-grams of the same text
    word_bleu      of text whose words are separated by spaces, unsmoothed: what multi-bleu and fairseq compute
    compound_bleu  the same with compounds split at their dashes, as in older English-German papers

References are a list with one text for each hypothesis, or several such lists (streams). Other shapes are errors: a
list of one-line lists would compare the first hypothesis with all references, which looks like a good result.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.fairseq import MosesTokenizer, WordTokenizer
from subquad.evaluate.measure import Measure

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

References = Sequence[str] | Sequence[Sequence[str]]


def bleu(hypotheses: Sequence[str], references: References, tokenize: str = "13a") -> Measure:
    """Returns the BLEU of detokenised text, from 0 to 100."""
    return _measure(_bleu(tokenize=tokenize), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: References) -> Measure:
    """Returns the chrF2 of detokenised text, from 0 to 100."""
    from sacrebleu.metrics.chrf import CHRF

    return _measure(CHRF(), hypotheses, references)


def word_bleu(hypotheses: Sequence[str], references: References) -> Measure:
    """Returns the BLEU of words separated by spaces, from 0 to 100, unsmoothed: it is 0 without a common 4-gram."""
    return _measure(_bleu(tokenize="none", smooth_method="none", force=True), hypotheses, references)


def compound_bleu(hypotheses: Sequence[str], references: References) -> Measure:
    """Returns `word_bleu` after `split_compounds` of hypotheses and references."""
    streams = [[split_compounds(text) for text in stream] for stream in reference_streams(hypotheses, references)]
    found = word_bleu([split_compounds(text) for text in hypotheses], streams)
    return Measure(found.statistics, found.score, f"{found.signature}|compounds:split")


def word_splitter(tokenizer: Tokenizer) -> tuple[str, Callable[[str], str]]:
    """Returns the name of a way to separate words by spaces for `word_bleu`, and a function that does it.

    A tokenizer of words splits as it always does (by moses or by spaces); for others it is sacrebleu's 13a.
    """
    if not isinstance(tokenizer, WordTokenizer):
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

        return "13a", Tokenizer13a()
    language = tokenizer.language if isinstance(tokenizer, MosesTokenizer) else None
    return f"moses-{language}" if language is not None else "spaces", tokenizer.split_words


def split_compounds(text: str) -> str:
    """Makes a dash between two characters a word of its own: `low-cost` becomes `low ##AT##-##AT## cost`."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def reference_streams(hypotheses: Sequence[str], references: References) -> list[Sequence[str]]:
    """Returns references as streams of one text for each hypothesis. Raises ValueError if their shape is wrong."""
    _check_texts(hypotheses, "hypotheses")
    if not len(hypotheses):
        raise ValueError("there are no hypotheses to score")
    if isinstance(references, str) or not len(references):
        raise ValueError("references must be a list with one text for each hypothesis, or several such lists")
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
        raise ValueError(f"{name} must be a list of texts, not {type(texts).__name__}")
    for place, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"{name}, line {place}: expected a text, got {type(text).__name__}")


def _measure(metric: "BLEU | CHRF", hypotheses: Sequence[str], references: References) -> Measure:
    streams = reference_streams(hypotheses, references)
    # sacrebleu's own bootstrap uses these two methods: statistics of each sentence, and the score of their sum.
    statistics = np.array(metric._extract_corpus_statistics(hypotheses, streams), np.float64)
    return Measure(statistics, functools.partial(_score, metric), str(metric.get_signature()))


def bleu_score(sums: np.ndarray) -> float:
    """Computes the score of `bleu` from sums of its statistics."""
    return _score(_plain_bleu(), sums)


@functools.cache
def _plain_bleu() -> "BLEU":
    return _bleu()


def _bleu(**options: Any) -> "BLEU":
    from sacrebleu.metrics.bleu import BLEU  # here: what it imports is for translation alone

    return BLEU(**options)


def _score(metric: "BLEU | CHRF", sums: np.ndarray) -> float:
    return float(metric._compute_score_from_stats(sums.round().astype(np.int64).tolist()).score)
