"""Decoding: search and sampling against the parallel form of the model, whatever shares the batch."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.data.tokenizers import TokenizerConfig, build_tokenizer
from subquad.decode.align import cross_attention_weights
from subquad.decode.beam import SearchRequest, SpecialTokens, beam_search, pad_rows
from subquad.decode.generate import Generator
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.sample import sample
from subquad.decode.scoring import Ensemble, LanguageModelScorer, Seq2SeqScorer
from subquad.decode.translate import Translator
from subquad.models import LanguageModel, Seq2Seq, build_model
from tests.models.cases import OPTIONS, able

SYMBOLS = SpecialTokens(pad=1, eos=2, unk=3)
STREAMING = OPTIONS | {"eva": {"window": 4, "chunk_size": 2}}  # a number of chunks would depend on the length to come
STACK = {"layers": 2, "heads": 2, "ffn_dim": 24}


def translator_model(mixer: str = "lightconv", cross: str = "softmax", vocab: int = 23, seed: int = 0) -> Seq2Seq:
    """A model with random weights, large enough that its hypotheses differ."""
    torch.manual_seed(seed)
    choice = {"name": mixer, **STREAMING.get(mixer, {})}
    decoder = STACK | {"mixer": choice, "cross": {"name": cross, **OPTIONS.get(cross, {})}}
    model = build_model(
        "encoder-decoder", dim=16, source_vocab=vocab, target_vocab=vocab, encoder=STACK, decoder=decoder
    )
    assert isinstance(model, Seq2Seq)
    return _lively(model)


def language_model(mixer: str = "lightconv", vocab: int = 23, **options: Any) -> LanguageModel:
    torch.manual_seed(1)
    decoder = STACK | {"mixer": {"name": mixer, **STREAMING.get(mixer, {})}}
    model = build_model("language-model", dim=16, vocab=vocab, decoder=decoder, **options)
    assert isinstance(model, LanguageModel)
    return _lively(model)


def _lively(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.6)
    return model.eval()


def words(model: Seq2Seq) -> Tensor:
    """The target embedding, which is the head as well."""
    assert isinstance(model.target.tokens, torch.nn.Embedding)
    return model.target.tokens.weight


def sources(count: int = 5, vocab: int = 23) -> list[list[int]]:
    """Of different lengths, ending with eos."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3 + 4 * (number % 3) + number for number in range(count)]
    return [[*torch.randint(4, vocab, (length,), generator=generator).tolist(), 2] for length in lengths]


@torch.no_grad()
def search(models: list[Seq2Seq], rows: list[list[int]], limit: int = 12, prefixes=None, **options: Any):
    options = {"beam": 4, "nbest": options.get("beam", 4), **options}
    source, padding = pad_rows(rows, SYMBOLS.pad)
    scorers = [Seq2SeqScorer(model, source, padding) for model in models]
    request = SearchRequest(torch.full((len(rows),), SYMBOLS.eos), torch.full((len(rows),), limit), prefixes)
    scorer = scorers[0] if len(models) == 1 else Ensemble(scorers)
    return beam_search(scorer, request, DecodeOptions(**options), SYMBOLS)


@torch.no_grad()
def parallel(model: Seq2Seq, row: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities of a target in one parallel pass over the sentence alone: (time, vocab)."""
    given = torch.tensor([[SYMBOLS.eos, *tokens[:-1]]])
    return model(torch.tensor([row]), given).logits[0].log_softmax(-1)


def assert_same(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    assert [found.tokens for found in ours] == [found.tokens for found in theirs]
    assert [found.score for found in ours] == pytest.approx([found.score for found in theirs], abs=1e-4)


# ---------------------------------------------------------------------- beam search


@pytest.mark.parametrize("lenpen", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all_targets(lenpen: float) -> None:
    model, row, limit, vocab = translator_model(vocab=7), [4, 5, 6, 2], 3, 7
    (found,) = search([model], [row], limit, beam=64, lenpen=lenpen)
    words = [token for token in range(vocab) if token not in (SYMBOLS.pad, SYMBOLS.eos)]
    every = []
    for length in range(1, limit + 1):
        for said in itertools.product(words, repeat=length):
            tokens = [*said, SYMBOLS.eos]
            logs = parallel(model, row, tokens).gather(1, torch.tensor(tokens)[:, None]).sum()
            every.append((float(logs) / len(tokens) ** lenpen, tokens))
    score, tokens = max(every)
    assert found[0].tokens == tokens
    assert found[0].score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("mixer", able("decoder"))
def test_steps_through_a_beam_equal_the_parallel_pass(mixer: str) -> None:
    model, rows = translator_model(mixer), sources()
    for row, hypotheses in zip(rows, search([model], rows), strict=True):
        assert len(hypotheses) == 4
        for found in hypotheses:
            logs = parallel(model, row, found.tokens).gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
            assert found.log_probabilities == pytest.approx(logs.tolist(), abs=1e-5)
            assert found.score == pytest.approx(float(logs.sum()) / len(found.tokens), abs=1e-5)


@pytest.mark.parametrize("cross", able("cross"))
def test_company_changes_nothing(cross: str) -> None:
    model, rows = translator_model(cross=cross), sources()
    together = search([model], rows)
    for row, found in zip(rows, together, strict=True):
        assert_same(search([model], [row])[0], found)


def test_a_beam_of_one_is_greedy() -> None:
    model, rows = translator_model(), sources()
    for row, (found,) in zip(rows, search([model], rows, beam=1, min_len=0), strict=True):
        logs = parallel(model, row, found.tokens)
        logs[:, SYMBOLS.pad] = -math.inf
        assert logs.argmax(-1).tolist()[:-1] == found.tokens[:-1]
        assert found.tokens[-1] == SYMBOLS.eos


def test_lengths_are_kept() -> None:
    model, rows = translator_model(), sources()
    for hypotheses in search([model], rows, limit=6, min_len=4):
        assert hypotheses
        for found in hypotheses:
            assert 4 <= len(found.tokens) - 1 <= 6
    for (found,) in search([model], rows, limit=0, beam=1):
        assert found.tokens == [SYMBOLS.eos]


def test_limits_are_each_sentence_s_own() -> None:
    model, rows = translator_model(), sources()
    source, padding = pad_rows(rows, SYMBOLS.pad)
    request = SearchRequest(torch.full((len(rows),), SYMBOLS.eos), torch.tensor([1, 2, 3, 4, 5]))
    with torch.no_grad():
        options = DecodeOptions(beam=3, nbest=3, min_len=5)
        found = beam_search(Seq2SeqScorer(model, source, padding), request, options, SYMBOLS)
    assert [{len(one.tokens) - 1 for one in hypotheses} for hypotheses in found] == [{1}, {2}, {3}, {4}, {5}]


def test_unknown_symbols_can_be_priced_out() -> None:
    model, rows = translator_model(), sources()
    with torch.no_grad():
        words(model)[SYMBOLS.unk] *= 3  # an unknown symbol that some hypothesis says
    said = [token for hypotheses in search([model], rows) for found in hypotheses for token in found.tokens]
    assert SYMBOLS.unk in said
    dear = search([model], rows, unk_penalty=100.0)
    assert SYMBOLS.unk not in [token for hypotheses in dear for found in hypotheses for token in found.tokens]


def test_no_sequence_of_two_tokens_appears_twice() -> None:
    model, rows = translator_model(), sources()

    def repeats(found: Hypothesis) -> bool:
        pairs = list(itertools.pairwise(found.tokens))
        return len(pairs) > len(set(pairs))

    assert any(repeats(one) for found in search([model], rows, limit=20) for one in found)
    assert not any(repeats(one) for found in search([model], rows, limit=20, no_repeat_ngram=2) for one in found)


def test_hypotheses_begin_with_their_prefix() -> None:
    model, rows = translator_model(), sources(3)
    prefixes = torch.tensor([[7, 8, 9], [10, 1, 1], [1, 1, 1]])
    found = search([model], rows, prefixes=prefixes)
    assert all(one.tokens[:3] == [7, 8, 9] for one in found[0])
    assert all(one.tokens[0] == 10 for one in found[1])
    assert_same(found[2], search([model], rows[2:])[0])
    logs = parallel(model, rows[0], found[0][0].tokens).gather(1, torch.tensor(found[0][0].tokens)[:, None])[:, 0]
    assert found[0][0].log_probabilities == pytest.approx(logs.tolist(), abs=1e-5)


def test_an_ensemble_is_the_mean_probability() -> None:
    first, second, rows = translator_model(), translator_model(seed=5), sources()
    for row, hypotheses in zip(rows, search([first, second], rows), strict=True):
        for found in hypotheses:
            each = [parallel(model, row, found.tokens).exp() for model in (first, second)]
            logs = torch.stack(each).mean(0).log().gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
            assert found.log_probabilities == pytest.approx(logs.tolist(), abs=1e-5)
    assert_same(search([first, first], rows)[0], search([first], rows)[0])


def test_scores_that_are_not_finite_are_refused() -> None:
    model = translator_model()
    with torch.no_grad():
        words(model).fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        search([model], sources(1))


# ---------------------------------------------------------------------- sampling


def scorer_of(model: LanguageModel, texts: list[list[int]]) -> LanguageModelScorer:
    read, padding = pad_rows([text[:-1] for text in texts], SYMBOLS.pad)
    return LanguageModelScorer.after(model, read, padding)


@torch.no_grad()
def draw(model: LanguageModel, texts: list[list[int]], limit: int = 8, **options: Any) -> list[Hypothesis]:
    return sample(scorer_of(model, texts), texts, limit, SampleOptions(**options), SYMBOLS)


TEXTS = [[2], [2, 5, 6, 7], [2, 9], [2, 8, 8, 8, 8, 8, 11]]


@pytest.mark.parametrize("mixer", able("decoder"))
def test_greedy_continuations_are_the_parallel_model_s(mixer: str) -> None:
    model = language_model(mixer)
    for text, found in zip(TEXTS, draw(model, TEXTS, temperature=0), strict=True):
        with torch.no_grad():
            logs = model(torch.tensor([[*text, *found.tokens]])).logits[0].log_softmax(-1)
        logs[:, SYMBOLS.pad] = -math.inf
        said = logs[len(text) - 1 : -1]
        assert said.argmax(-1).tolist() == found.tokens
        assert found.log_probabilities == pytest.approx(said.max(-1).values.tolist(), abs=1e-5)


def test_draws_depend_on_the_seed_alone() -> None:
    model = language_model()
    drawn = draw(model, TEXTS, limit=12)
    assert drawn == draw(model, TEXTS, limit=12)
    assert_same(drawn[:1], draw(model, TEXTS[:1], limit=12))
    assert drawn != draw(model, TEXTS, limit=12, seed=2)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"top_p": 0.8, "repetition_penalty": 1.5}])
@pytest.mark.parametrize("every", [3, 8, 100])
def test_draws_do_not_depend_on_when_ends_are_looked_for(
    every: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model()
    at_once = draw(model, TEXTS, limit=80, **options)
    assert len({len(found.tokens) for found in at_once}) > 1, "texts end at different steps"
    monkeypatch.setattr("subquad.decode.sample.steps_between_checks", lambda _: every)
    later = draw(model, TEXTS, limit=80, **options)
    assert [found.tokens for found in later] == [found.tokens for found in at_once]
    for ours, theirs in zip(later, at_once, strict=True):
        assert ours.log_probabilities == pytest.approx(theirs.log_probabilities, abs=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_the_narrowest_draw_is_greedy(options: dict[str, Any]) -> None:
    model = language_model()
    assert draw(model, TEXTS, **options) == draw(model, TEXTS, temperature=0)


def test_frequencies_are_those_of_the_model() -> None:
    model, count = language_model(vocab=8), 4000
    texts = [[2, 5]] * count
    with torch.no_grad():
        p = model(torch.tensor([[2, 5]])).logits[0, -1]
    p[SYMBOLS.pad] = -math.inf
    for options in ({}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.6}):
        expected = (p / options.get("temperature", 1.0)).softmax(-1)
        order = expected.argsort(descending=True)
        if "top_k" in options:
            expected[order[3:]] = 0
        if "top_p" in options:
            before = expected[order].cumsum(0) - expected[order]
            expected[order[before >= 0.6]] = 0
        expected /= expected.sum()
        drawn = torch.tensor([found.tokens[0] for found in draw(model, texts, limit=1, **options)])
        seen = drawn.bincount(minlength=8) / count
        assert (seen - expected).abs().max() < 4 * 0.5 / count**0.5
        assert not bool(seen[expected == 0].any())


def test_a_penalty_ends_repetition() -> None:
    model = language_model()
    (plain,) = draw(model, [[2, 5, 6]], limit=40, temperature=0)
    (varied,) = draw(model, [[2, 5, 6]], limit=40, temperature=0, repetition_penalty=50.0)
    assert len(set(plain.tokens)) < len(plain.tokens)
    assert len(set(varied.tokens[:15])) == len(varied.tokens[:15])


# ---------------------------------------------------------------------- text in, text out

TOKENIZER = build_tokenizer(TokenizerConfig(kind="characters"), ["abcdefghij klmnopqrs"])


def text_translator(**options: Any) -> Translator:
    model = translator_model(vocab=TOKENIZER.size)
    return Translator([model], TOKENIZER, TOKENIZER, DecodeOptions(**{"max_len_b": 8, "beam": 2, **options}))


def test_every_line_has_one_translation_in_order() -> None:
    lines = ["abc", "", "a" * 40, "b", "", "fed cba", "ab"]
    translator = text_translator(batch_sentences=2)
    found = list(translator.translate(iter(lines)))
    assert len(found) == len(lines)
    assert [one.text for one in found][1] == ""
    assert translator.empty == 2
    alone = [next(iter(text_translator().translate([line]))).text for line in lines]
    assert [one.text for one in found] == alone


def test_long_lines_are_cut_where_the_model_ends() -> None:
    torch.manual_seed(0)
    model = build_model(
        "encoder-decoder",
        dim=16,
        source_vocab=TOKENIZER.size,
        target_vocab=TOKENIZER.size,
        source={"positions": "learned", "max_length": 8},
        target={"positions": "learned", "max_length": 6},
        encoder=STACK,
        decoder=STACK,
    )
    assert isinstance(model, Seq2Seq)
    translator = Translator([model.eval()], TOKENIZER, TOKENIZER, DecodeOptions(beam=2))
    found = list(translator.translate(["abcdefghij", "abc"]))
    assert translator.truncated == 1
    assert all(len(one.candidates[0].tokens) <= 6 for one in found)
    assert found[0].text == next(iter(translator.translate(["abcdefg"]))).text


def test_alignments_point_into_the_source() -> None:
    model = translator_model(vocab=TOKENIZER.size)
    translator = Translator([model], TOKENIZER, TOKENIZER, DecodeOptions(max_len_b=8), alignments=True)
    (found,) = translator.translate(["abcdef"])
    alignment = found.candidates[0].alignment
    assert alignment is not None
    assert [target for _, target in alignment] == list(range(len(found.candidates[0].tokens) - 1))
    assert all(0 <= source <= 6 for source, _ in alignment)
    other = translator_model(vocab=TOKENIZER.size, cross="linformer")
    with pytest.raises(ValueError, match="alignments need softmax cross-attention"):
        Translator([other], TOKENIZER, TOKENIZER, alignments=True)


def test_weights_of_a_source_are_where_its_words_are() -> None:
    """Padding stands before the words of the second row, as in the originals' batches."""
    model, source = translator_model(), torch.randint(4, 23, (2, 6), generator=torch.Generator().manual_seed(0))
    target = torch.randint(4, 23, (2, 4), generator=torch.Generator().manual_seed(1))
    padding = torch.arange(6) < torch.tensor([[0], [2]])
    weights = cross_attention_weights(model, source, padding, target)
    alone = cross_attention_weights(model, source[1:, 2:], None, target[1:])
    torch.testing.assert_close(weights[1, :, 2:], alone[0])
    assert not weights[1, :, :2].any()


def test_models_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="need the same tokenizers"):
        Translator([translator_model(vocab=9)], TOKENIZER, TOKENIZER)


def test_prompts_go_on_by_drawing_and_by_search() -> None:
    model = language_model(vocab=TOKENIZER.size)
    generator = Generator([model], TOKENIZER, DecodeOptions(beam=3, nbest=2))
    drawn = generator.sample(["abc", "", "fedc"], 6, SampleOptions(temperature=0))
    assert len(drawn) == 3
    assert drawn[0].tokens == generator.sample(["abc"], 6, SampleOptions(temperature=0))[0].tokens
    assert drawn[0].text == "abc" + TOKENIZER.decode(drawn[0].tokens)
    found = generator.search(["abc", ""], 6)
    assert [len(several) for several in found] == [2, 2]
    greedy = Generator([model], TOKENIZER, DecodeOptions(beam=1, min_len=0)).search(["abc"], 6)[0][0]
    assert greedy.tokens[:6] == drawn[0].tokens[:6]


def test_texts_longer_than_the_model_are_refused() -> None:
    model = language_model(vocab=TOKENIZER.size, embedding={"positions": "learned", "max_length": 10})
    generator = Generator([model], TOKENIZER)
    assert generator.sample(["abcd"], 6, SampleOptions())
    with pytest.raises(ValueError, match="exceed the 10"):
        generator.sample(["abcd"], 7, SampleOptions())
