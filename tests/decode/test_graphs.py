"""Steps as graphs: recorded once and replayed, they find what steps without graphs find, with every mechanism."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from subquad.decode import graphs
from subquad.decode.beam import SearchRequest, beam_search, pad_rows
from subquad.decode.graphs import GraphScorer
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.sample import sample
from subquad.decode.scoring import Scorer, Seq2SeqScorer
from subquad.decode.translate import Translator
from tests.decode.recording import record
from tests.decode.test_decoding import (
    SYMBOLS,
    TEXTS,
    TOKENIZER,
    assert_same,
    language_model,
    scorer_of,
    sources,
    translator_model,
)
from tests.models.cases import able


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's kernels are no operations that could be recorded. Little room has to be renewed often."""
    monkeypatch.setenv("SUBQUAD_KERNELS", "reference")
    monkeypatch.setattr(graphs, "LEAST_ROOM", 5)


@torch.no_grad()
def search(model: Any, recorded: list[int] | None = None, beam: int = 3) -> list[list[Hypothesis]]:
    """recorded: is told how many graphs there were; None: there are none."""
    source, padding = pad_rows(sources(), SYMBOLS.pad)
    scorer: Scorer = Seq2SeqScorer(model, source, padding)
    if recorded is not None:

        def counted(run: Any, undo: Any) -> Any:
            recorded.append(1)
            return record(run, undo)

        scorer = GraphScorer(scorer, counted)  # type: ignore[arg-type]
    request = SearchRequest(torch.full((5,), SYMBOLS.eos), torch.tensor([14, 3, 6, 14, 9]))
    return beam_search(scorer, request, DecodeOptions(beam=beam, nbest=beam, lenpen=0.6), SYMBOLS)


@pytest.mark.parametrize("mixer", able("decoder"))
def test_beams_are_those_without_graphs(mixer: str) -> None:
    model, recorded = translator_model(mixer), list[int]()
    for ours, theirs in zip(search(model, recorded), search(model), strict=True):
        assert_same(ours, theirs)
    # 14 steps: 2 times half of the sentences leave at most, and room for 5 tokens and as many again is used up
    assert 1 <= len(recorded) <= 6


@pytest.mark.parametrize("cross", able("cross"))
def test_contexts_of_every_kind(cross: str) -> None:
    model = translator_model(cross=cross)
    for ours, theirs in zip(search(model, [], beam=1), search(model, beam=1), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("mixer", able("decoder"))
@torch.no_grad()
def test_draws_are_those_without_graphs(mixer: str) -> None:
    model, options = language_model(mixer), SampleOptions()
    plain = sample(scorer_of(model, TEXTS), TEXTS, 20, options, SYMBOLS)
    ours = sample(GraphScorer(scorer_of(model, TEXTS), record), TEXTS, 20, options, SYMBOLS)
    for one, other in zip(ours, plain, strict=True):
        assert_same([one], [other])


@pytest.mark.parametrize("mixer", able("decoder"))
@torch.no_grad()
def test_a_step_is_compiled_once(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph of torch.compile without breaks serves every step: no shape and no number of Python's changes."""
    monkeypatch.setattr(graphs, "LEAST_ROOM", 64)
    torch._dynamo.reset()
    model, options, compiler = language_model(mixer), SampleOptions(temperature=0), CompileCounter()

    def compiled(run: Any, undo: Any) -> Any:
        return torch.compile(run, backend=compiler, fullgraph=True, dynamic=False)

    (plain,) = sample(scorer_of(model, TEXTS[1:2]), TEXTS[1:2], 7, options, SYMBOLS)
    (ours,) = sample(GraphScorer(scorer_of(model, TEXTS[1:2]), compiled), TEXTS[1:2], 7, options, SYMBOLS)
    assert_same([ours], [plain])
    assert len(ours.tokens) > 3
    assert compiler.frame_count == 1


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        Translator([translator_model(vocab=TOKENIZER.size)], TOKENIZER, TOKENIZER, DecodeOptions(graphs=True))
