"""Beam search of a batch against the plain one of a sentence, on random scores: ties, early ends, every option."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.decode import beam
from subquad.decode.beam import SearchRequest, SpecialTokens, beam_search, pad_rows
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions
from subquad.decode.scoring import TokenScores
from tests.decode.reference import search_one

SPECIAL = SpecialTokens(pad=1, eos=2, unk=3)


class Language:
    """Random logits (V,) of every sentence and text. levels: how many values there are; few of them make ties."""

    def __init__(self, vocab: int, levels: int, eager: float, seed: int) -> None:
        """eager: what is added to the logit of eos."""
        self.vocab, self.levels, self.eager, self.seed = vocab, levels, eager, seed

    def logits(self, sentence: int, tokens: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, sentence, *tokens)) % 2**40)
        values = torch.randint(self.levels, (self.vocab,), generator=generator) * (3.0 / self.levels)
        values[SPECIAL.eos] += self.eager
        return values


class LanguageScorer:
    """Scores the texts of rows, and holds the search to its word about rows and contexts."""

    def __init__(self, language: Language, sentences: int, keeps_rows: bool = False) -> None:
        self.language = language
        self.rows: list[tuple[int, list[int]]] = [(number, []) for number in range(sentences)]
        self.contexts = list(range(sentences))
        self.begun = False
        self.keeps_rows = keeps_rows

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        assert len(tokens) == len(self.rows)
        if self.begun:  # the first token is the one that stands before every text
            self.rows = [(number, [*text, token]) for (number, text), token in zip(self.rows, tokens, strict=True)]
        self.begun = True
        width = len(self.rows) // len(self.contexts)
        assert [number for number, _ in self.rows] == [number for number in self.contexts for _ in range(width)]
        logits = [self.language.logits(number, [int(token) for token in text]) for number, text in self.rows]
        return TokenScores.of(torch.stack(logits), temperature)

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        self.rows = [self.rows[place] for place in index.tolist()]
        if contexts is not None:
            self.contexts = [self.contexts[place] for place in contexts.tolist()]


def search(
    language: Language,
    limits: Sequence[int],
    options: DecodeOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
    keeps_rows: bool = False,
) -> list[list[Hypothesis]]:
    count = len(limits)
    starts = pad_rows(prefixes, SPECIAL.pad)[0] if prefixes is not None else None
    request = SearchRequest(torch.full((count,), SPECIAL.eos), torch.tensor(limits), starts)
    return beam_search(LanguageScorer(language, count, keeps_rows), request, options, SPECIAL)


def assert_as_defined(
    language: Language,
    limits: Sequence[int],
    options: DecodeOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
    keeps_rows: bool = False,
) -> None:
    found = search(language, limits, options, prefixes, keeps_rows)
    for number, limit in enumerate(limits):
        prefix = prefixes[number] if prefixes is not None else ()
        alone = search_one(partial(language.logits, number), limit, options, SPECIAL, prefix)
        assert found[number] == alone


option_sets = st.fixed_dictionaries(
    {
        "beam": st.integers(1, 5),
        "lenpen": st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        "min_len": st.integers(0, 3),
        "unk_penalty": st.sampled_from([0.0, 0.75]),
        "temperature": st.sampled_from([1.0, 0.5]),
        "no_repeat_ngram": st.sampled_from([0, 0, 1, 2, 3]),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), options=option_sets, vocab=st.integers(5, 40), seed=st.integers(0, 10**6))
def test_a_batch_is_the_searches_of_its_sentences(data: Any, options: dict[str, Any], vocab: int, seed: int) -> None:
    levels, eager = data.draw(st.sampled_from([2, 4, 1000])), data.draw(st.sampled_from([-9.0, 0.0, 1.5]))
    limits = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=5))
    prefixes = None
    if data.draw(st.booleans()):
        words = st.integers(4, vocab - 1)
        prefixes = data.draw(st.lists(st.lists(words, max_size=3), min_size=len(limits), max_size=len(limits)))
    nbest = data.draw(st.integers(1, options["beam"]))
    every = data.draw(st.sampled_from([1, 3, 8]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam, "steps_between_checks", lambda _: every)
        language = Language(vocab, levels, eager, seed)
        assert_as_defined(language, limits, DecodeOptions(nbest=nbest, **options), prefixes, data.draw(st.booleans()))


@pytest.mark.parametrize("every", [1, 8])
def test_more_hypotheses_than_words(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps have fewer candidates than the beam is wide; nothing goes on behind its end."""
    monkeypatch.setattr(beam, "steps_between_checks", lambda _: every)
    assert_as_defined(Language(6, 10**6, 0.0, 0), [3, 5], DecodeOptions(beam=40, nbest=40))


@pytest.mark.parametrize("every", [1, 8])
def test_long_searches_outgrow_what_was_reserved(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam, "steps_between_checks", lambda _: every)
    assert_as_defined(Language(9, 1000, -5.0, 1), [150, 3], DecodeOptions(beam=2, nbest=2))


def test_no_sentences() -> None:
    assert search(Language(9, 4, 0.0, 0), [], DecodeOptions()) == []


def test_scores_that_stop_being_finite_are_refused_late_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Language):
        def logits(self, sentence: int, tokens: Sequence[int]) -> Tensor:
            values = super().logits(sentence, tokens)
            return values * float("nan") if len(tokens) == 2 else values

    for every in (1, 8, 100):
        monkeypatch.setattr(beam, "steps_between_checks", lambda _, every=every: every)
        with pytest.raises(ValueError, match="not finite"):
            search(Broken(9, 1000, -9.0, 0), [6, 5], DecodeOptions(beam=1))
