"""Measures: BLEU and chrF against sacrebleu, shapes that are refused, the bootstrap, context windows, ranks."""

import math

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.blocks import BlockOptions, Blocks
from subquad.data.tokenizers.fairseq import FairseqDictionary, WordTokenizer
from subquad.data.tokenizers.simple import ByteTokenizer
from subquad.evaluate.accuracy import accuracy, class_ranks
from subquad.evaluate.bleu_and_chrf import (
    bleu,
    chrf,
    compound_bleu,
    split_compounds,
    word_bleu,
    word_splitter,
)
from subquad.evaluate.measure import Measure
from subquad.evaluate.perplexity import ContextBlocks, TextSize, TokenLines, bits_per_unit, perplexity
from subquad.evaluate.significance import confidence_interval, paired_test, resample_sums
from tests.originals.token_bleu import token_bleu

HYPOTHESES = ["The cat sat on the mat.", "A low-cost house, near the sea.", "Two dogs are playing in the snow."]
REFERENCES = ["The cat sat on a mat.", "A low-cost house near the sea.", "Two dogs play in the snow."]
OTHERS = ["On the mat sat the cat.", "A cheap house by the sea.", "Two dogs are playing in snow."]

# ---------------------------------------------------------------------- BLEU and chrF


def test_bleu_and_chrf_are_sacrebleus_with_its_signature() -> None:
    for references, streams in ((REFERENCES, [REFERENCES]), ([REFERENCES, OTHERS], [REFERENCES, OTHERS])):
        found = bleu(HYPOTHESES, references)
        assert found.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, streams).score, abs=1e-9)
        assert found.signature.startswith(f"nrefs:{len(streams)}|case:mixed|eff:no|tok:13a|smooth:exp|version:")
        found = chrf(HYPOTHESES, references)
        assert found.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, streams).score, abs=1e-9)
        assert "nc:6" in found.signature


def test_references_in_lists_of_their_own_are_refused() -> None:
    """sacrebleu takes them for streams of one line, and scores the first sentence alone against all of them."""
    wrapped = [[reference] for reference in REFERENCES]
    wrong, right = sacrebleu.corpus_bleu(HYPOTHESES, wrapped).score, bleu(HYPOTHESES, REFERENCES).value
    assert wrong != pytest.approx(right, abs=1)
    for metric in (bleu, chrf, word_bleu, compound_bleu):
        with pytest.raises(ValueError, match="3 hypotheses, but reference stream 1 of 3 has 1 line"):
            metric(HYPOTHESES, wrapped)


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (HYPOTHESES, REFERENCES[:2], "3 hypotheses, but references of 1 has 2 line"),
        (HYPOTHESES, [REFERENCES, OTHERS[:2]], "reference stream 2 of 2 has 2 line"),
        (HYPOTHESES, "one text", "references must be a list"),
        (HYPOTHESES, [], "references must be a list"),
        (HYPOTHESES, [*REFERENCES[:2], None], "references, line 3: expected a text, got NoneType"),
        (HYPOTHESES, [REFERENCES, 3], "reference stream 2 must be a list of texts, not int"),
        ("one text", REFERENCES, "hypotheses must be a list of texts, not str"),
        ([["a"], ["b"], ["c"]], REFERENCES, "hypotheses, line 1: expected a text, got list"),
        ([], [], "no hypotheses"),
    ],
)
def test_wrong_shapes_are_refused(hypotheses, references, message) -> None:
    with pytest.raises(ValueError, match=message):
        bleu(hypotheses, references)


def test_compounds_split_where_two_characters_meet_at_a_dash() -> None:
    assert split_compounds("low-cost homes - a-b-c -x y-") == "low ##AT##-##AT## cost homes - a ##AT##-##AT## b-c -x y-"
    hypotheses, references = ["a low-price house is here"], ["a low-cost house is here"]
    plain, split = word_bleu(hypotheses, references), compound_bleu(hypotheses, references)
    # of seven words with the compound in parts, six are right; of five with the compound as one, four
    assert plain.statistics[0, [0, 2]].tolist() == [5, 4]
    assert split.statistics[0, [0, 2]].tolist() == [7, 6]
    assert "compounds:split" in split.signature


def test_words_for_tokenised_bleu_are_those_of_the_tokenizer() -> None:
    name, words = word_splitter(ByteTokenizer())
    assert (name, words("Well, it's red.")) == ("13a", "Well , it's red .")
    name, words = word_splitter(WordTokenizer(FairseqDictionary()))
    assert (name, words("Well , it 's red.")) == ("spaces", "Well , it 's red.")


def test_unknown_words_of_a_reference_never_match() -> None:
    sentence = [5, 6, 3, 7, 8, 9, 2]
    found = token_bleu([sentence], [[1, 1, *sentence]], pad=1, eos=2, unk=3)
    assert found.statistics[0].tolist() == [6, 6, 5, 3, 1, 0, 6, 5, 4, 3]
    assert found.value == 0, "unsmoothed"


# ---------------------------------------------------------------------- the bootstrap


def means(values: list[float]) -> Measure:
    return accuracy(np.array(values), "mean")


def test_the_interval_of_a_mean_is_that_of_statistics() -> None:
    hits = np.random.default_rng(0).random(2000) < 0.3
    found = confidence_interval(accuracy(hits, "top-1"), resamples=2000)
    deviation = math.sqrt(hits.mean() * (1 - hits.mean()) / len(hits))
    assert found.low == pytest.approx(hits.mean() - 1.96 * deviation, abs=0.15 * deviation)
    assert found.high == pytest.approx(hits.mean() + 1.96 * deviation, abs=0.15 * deviation)
    assert confidence_interval(accuracy(hits, "top-1"), resamples=2000) == found, "the seed is fixed"


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 5))
def test_a_resample_draws_as_many_samples_as_there_are(samples: int, resamples: int, seed: int) -> None:
    sums = resample_sums(np.eye(samples), resamples, seed)
    assert sums.shape == (resamples, samples)
    assert (sums.sum(1) == samples).all()
    assert (sums >= 0).all()


def test_resamples_do_not_depend_on_how_many_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = np.random.default_rng(1).random((7, 3))
    before = resample_sums(statistics, 50)
    monkeypatch.setattr("subquad.evaluate.significance.CHUNK", 20)
    np.testing.assert_allclose(resample_sums(statistics, 50), before)


def test_paired_systems() -> None:
    generator = np.random.default_rng(2)
    first = (generator.random(500) < 0.6).astype(float)
    same = paired_test(means(first.tolist()), means(first.tolist()))
    assert (same.difference, same.p_value) == (0, 1)
    better = np.maximum(first, generator.random(500) < 0.1)
    surely = paired_test(means(better.tolist()), means(first.tolist()))
    assert surely.p_value < 0.01
    assert surely.low > 0
    assert surely.low < surely.difference < surely.high
    other = paired_test(means(first.tolist()), means((generator.random(500) < 0.6).astype(float).tolist()))
    assert other.p_value > 0.05
    assert other.low < 0 < other.high
    # pairing counts: the same rates without pairs are not as sure
    shuffled = paired_test(means(better.tolist()), means(generator.permutation(first).tolist()))
    assert shuffled.high - shuffled.low > 1.5 * (surely.high - surely.low)


def test_the_interval_of_bleu_is_as_wide_as_sacrebleus() -> None:
    from sacrebleu.metrics.bleu import BLEU

    hypotheses, references = HYPOTHESES * 20, REFERENCES * 20
    theirs = BLEU().corpus_score(hypotheses, [references], n_bootstrap=1000)
    ours = confidence_interval(bleu(hypotheses, references))
    assert (ours.high - ours.low) / 2 == pytest.approx(theirs._ci, rel=0.1)
    assert (ours.high + ours.low) / 2 == pytest.approx(theirs._mean, abs=0.2 * theirs._ci)


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="one system has 3, the other 2"):
        paired_test(means([1, 0, 1]), means([1, 0]))
    with pytest.raises(ValueError, match="computed differently: mean and median"):
        paired_test(means([1, 0]), accuracy(np.array([1, 0]), "median"))
    with pytest.raises(ValueError, match="needs samples"):
        means([])


# ---------------------------------------------------------------------- perplexity

PAD, EOS = 1, 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(4, 90), max_size=12), min_size=1, max_size=8),
    st.integers(1, 12),
    st.data(),
    st.sampled_from(["none", "eos", "complete"]),
)
def test_every_token_is_scored_once_after_the_right_context(lines, size, data, breaks) -> None:
    context = data.draw(st.integers(0, size - 1))
    options = BlockOptions(tokens_per_sample=size, breaks=breaks)
    blocks = ContextBlocks(TokenLines(lines), options, context, PAD, EOS)
    stream = [token for line in lines for token in (*line, EOS)]
    inputs = [EOS, *stream[:-1]]
    batch = blocks.batch(np.arange(len(blocks)))
    place = 0
    for number in range(len(blocks)):
        length = int(blocks.sizes[0][number])
        read, said = batch["inputs"][number, :length].tolist(), batch["targets"][number, :length].tolist()
        counted = [token for token in said if token != PAD]
        before = min(context, place)
        assert said == [PAD] * before + stream[place : place + len(counted)]
        assert read == inputs[place - before : place + len(counted)]
        assert (batch["targets"][number, length:] == PAD).all()
        if breaks == "none":
            assert length <= size
        place += len(counted)
    assert place == len(stream)


def test_windows_of_the_originals() -> None:
    """512 tokens with a context of 0, 256 and 480: 512, 256 and 32 new ones in each piece after the first."""
    lines = TokenLines([list(range(4, 1003))])  # 1,000 tokens with the end
    for context, new in ((0, 512), (256, 256), (480, 32)):
        blocks = ContextBlocks(lines, BlockOptions(tokens_per_sample=512), context, PAD, EOS)
        assert len(blocks) == math.ceil(1000 / new)
        assert (np.diff(blocks.blocks.begin) == new).all()
        assert blocks.sizes[0].max() == min(512, 1000)


def test_without_context_the_pieces_are_those_of_training() -> None:
    lines, options = TokenLines([[5, 6, 7], [], [8, 9]]), BlockOptions(tokens_per_sample=3)
    plain = Blocks(lines, options, EOS)
    blocks = ContextBlocks(lines, options, 0, PAD, EOS)
    for number in range(len(plain)):
        batch = blocks.batch(np.array([number]))
        assert [batch["inputs"][0].tolist(), batch["targets"][0].tolist()] == [part.tolist() for part in plain[number]]


@pytest.mark.parametrize("context", [-1, 4, 5])
def test_a_context_that_leaves_nothing_is_refused(context: int) -> None:
    with pytest.raises(ValueError, match="must be 0 to 3"):
        ContextBlocks(TokenLines([[5]]), BlockOptions(tokens_per_sample=4), context, PAD, EOS)


def test_denominators() -> None:
    size = TextSize.of(["Grüße an alle", "", "x"])
    assert size == TextSize(lines=3, words=4 + 1 + 2, bytes=16 + 1 + 2)
    losses = np.array([[math.log(8) * 6, 6], [math.log(2) * 2, 2]])
    total = 20 * math.log(2)
    assert perplexity(losses).value == pytest.approx(math.exp(total / 8))
    assert perplexity(losses, 7 / 8).value == pytest.approx(math.exp(total / 7))
    assert bits_per_unit(losses, 19 / 8, "").value == pytest.approx(20 / 19)
    assert perplexity(np.array([[1e9, 1.0]])).value < math.inf, "a hopeless model has a number too"


# ---------------------------------------------------------------------- accuracy


def test_ranks_count_what_is_not_surely_worse() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.2, 0.2, 0.1], [math.nan, 0.5, 0.1], [1.0, math.nan, 0.0]])
    assert class_ranks(logits, torch.tensor([2, 0, 0, 0])).tolist() == [1, 1, 2, 1]
    assert class_ranks(logits[:1], torch.tensor([1])).tolist() == [0]
