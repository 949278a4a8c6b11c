"""Decoding on a GPU: what the CPU finds, and how seldom Python waits for it."""

import copy
from typing import Any

import pytest
import torch

from subquad.decode.beam import STEPS_UNWATCHED, SearchRequest, beam_search, pad_rows
from subquad.decode.graphs import GraphScorer
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.sample import sample
from subquad.decode.scoring import LanguageModelScorer, Scorer, Seq2SeqScorer
from tests.decode.test_decoding import SYMBOLS, TEXTS, assert_same, language_model, sources, translator_model
from tests.emulated_gpu.counts import SYNCHRONISATION, Counts, counted
from tests.models.cases import able

STEPS = 33
WAITS_OF_A_BATCH = 6
"""Limits are copied to the device; at the end, whether all was finite, and four tensors of hypotheses are read."""


def for_mixers() -> Any:
    """softmax in the suite, others on a GPU and at night."""
    rest = [pytest.param(name, marks=pytest.mark.nightly) for name in able("decoder") if name != "softmax"]
    return pytest.mark.parametrize("mixer", ["softmax", *rest])


@torch.no_grad()
def search(model: Any, device: str, graphs: bool = False, **options: Any) -> tuple[list[list[Hypothesis]], Counts]:
    model = copy.deepcopy(model).to(device)
    source, padding = (one.to(device) for one in pad_rows(sources(3), SYMBOLS.pad))
    prefixes = torch.tensor([[7], [1], [9]], device=device)
    scorer: Scorer = Seq2SeqScorer(model, source, padding)
    if graphs:
        assert isinstance(scorer, Seq2SeqScorer)
        scorer = GraphScorer(scorer)
    request = SearchRequest(torch.full((3,), SYMBOLS.eos, device=device), torch.tensor([STEPS - 1, 5, 20]), prefixes)
    with counted() as counts:
        found = beam_search(scorer, request, DecodeOptions(beam=3, nbest=3, **options), SYMBOLS)
    return found, counts


def assert_all_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


@for_mixers()
def test_beam_search_waits_every_few_steps(mixer: str, emulated: bool) -> None:
    options: dict[str, Any] = {"no_repeat_ngram": 2, "unk_penalty": 0.5, "min_len": STEPS - 3}
    model = translator_model(mixer)
    expected, _ = search(model, "cpu", **options)
    found, counts = search(model, "cuda", **options)
    assert_all_same(found, expected)
    if emulated:
        waits = STEPS // STEPS_UNWATCHED + WAITS_OF_A_BATCH
        assert counts.synchronisations <= waits, counts.lines(SYNCHRONISATION)


@for_mixers()
def test_beam_search_by_graphs(mixer: str, emulated: bool) -> None:
    if emulated:
        pytest.skip("the emulated GPU has no graphs")
    model = translator_model(mixer)
    assert_all_same(search(model, "cuda", graphs=True)[0], search(model, "cpu")[0])


@for_mixers()
def test_sampling_waits_every_few_steps(mixer: str, emulated: bool) -> None:
    model, options = language_model(mixer), SampleOptions(top_k=5, repetition_penalty=1.2)
    read, padding = pad_rows([text[:-1] for text in TEXTS], SYMBOLS.pad)
    found = {}
    with torch.no_grad():
        for device in ("cpu", "cuda"):
            there = copy.deepcopy(model).to(device)
            scorer = LanguageModelScorer.after(there, read.to(device), padding.to(device))
            with counted() as counts:
                found[device] = sample(scorer, TEXTS, STEPS, options, SYMBOLS, device)
    assert_all_same([[one] for one in found["cuda"]], [[one] for one in found["cpu"]])
    if emulated:
        # prompts and numbers are copied to the device; rows may leave at each look
        waits = 2 * -(-STEPS // STEPS_UNWATCHED) + len(TEXTS) + 2
        assert counts.synchronisations <= waits, counts.lines(SYNCHRONISATION)
