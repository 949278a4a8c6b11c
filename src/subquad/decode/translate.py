"""Translates lines of text. Every line has one result, in the order of the lines.

Lines are decoded in batches of similar length. An empty line has an empty translation; a line that is too long for the
model or for a batch is truncated. Both are counted, so that users can be told.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from subquad.data.batches import Budget, batches_by_tokens
from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.fairseq import post_process
from subquad.decode.align import Alignment, align, check_alignments
from subquad.decode.beam import SearchRequest, beam_search, pad_rows, special_tokens
from subquad.decode.graphs import GraphScorer, check_graphs
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.inference import prepare_for_inference
from subquad.decode.limits import max_source_length, max_text_length
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.sample import sample
from subquad.decode.scoring import Seq2SeqScorer, combine_scorers
from subquad.kernels.parallel import parallel_map
from subquad.models import Seq2Seq
from subquad.models.base import compile_blocks

WINDOW = 2048
"""The number of lines that are read before they are decoded: enough to form batches of similar lengths."""


class Candidate(NamedTuple):
    """text: detokenised. score, log_probabilities: see `Hypothesis`. alignment: None unless it was requested."""

    text: str
    tokens: list[int]
    score: float
    log_probabilities: list[float]
    alignment: Alignment | None = None


class Translation(NamedTuple):
    """The translations of a line, the best first. There is at least one."""

    candidates: list[Candidate]

    @property
    def text(self) -> str:
        return self.candidates[0].text


EMPTY_TRANSLATION = Translation([Candidate("", [], 0.0, [], [])])


class Translator:
    """Translates with one model, or with the mean probability of several models."""

    def __init__(
        self,
        models: Sequence[Seq2Seq],
        source: Tokenizer,
        target: Tokenizer,
        options: DecodeOptions | None = None,
        *,
        alignments: bool = False,
    ) -> None:
        """alignments: whether to compute them, with the first model. All models need the tokenizers' vocabularies."""
        for model in models:
            sizes = model.config.source_vocab, model.config.target_vocab
            if sizes != (source.size, target.size):
                raise ValueError(
                    f"the tokenizers have {source.size} and {target.size} tokens, but a model has {sizes[0]} and "
                    f"{sizes[1]}: all models of an ensemble need the same tokenizers"
                )
        if alignments:
            check_alignments(models[0])
        self.options = options or DecodeOptions()
        self.alignment_model, self.alignments = models[0], alignments
        self.models = [prepare_for_inference(model, self.options.weights) for model in models]
        if self.options.compile:
            for model in self.models:
                compile_blocks(model)
        self.source, self.target, self.special = source, target, special_tokens(target)
        self.device = next(models[0].parameters()).device
        if self.options.graphs:
            check_graphs(self.device)
        limits = [max_source_length(model) for model in models]
        self.max_source_tokens = min([self.options.batch_tokens, *(limit for limit in limits if limit is not None)])
        self.max_target_tokens = _smallest(max_text_length(model) for model in models)
        self.empty = self.truncated = 0

    def translate(self, texts: Iterable[str], prefixes: Iterable[str] | None = None) -> Iterator[Translation]:
        """Yields one result for each text, in order. prefixes: what each translation must begin with."""
        rest = iter(texts)
        starts = iter(prefixes) if prefixes is not None else None
        while window := list(itertools.islice(rest, WINDOW)):
            given = list(itertools.islice(starts, len(window))) if starts is not None else None
            yield from self.translate_window(window, given)

    def translate_window(self, texts: Sequence[str], prefixes: Sequence[str] | None = None) -> Iterator[Translation]:
        """Translates a list of texts, decoded in batches of similar length, and yields the results in order."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise ValueError(f"there are {len(texts)} lines and {len(prefixes)} prefixes")
        read = self.source.encode_batch(texts)
        sources = [self._with_eos(tokens) if text.strip() else [] for text, tokens in zip(texts, read, strict=True)]
        starts = self.target.encode_batch(prefixes) if prefixes is not None else [[] for _ in texts]
        yield from self._translate_tokens(sources, starts)

    def search_tokens(
        self, sources: Sequence[list[int]], drawing: SampleOptions | None = None
    ) -> list[list[Hypothesis]]:
        """The `nbest` best hypotheses of each source of token ids without eos. drawing: draw one at random instead."""
        read = [self._with_eos(tokens) for tokens in sources]
        if drawing is None:
            found = self._translate_tokens(read, [[] for _ in read])
            return [
                [Hypothesis(one.tokens, one.score, one.log_probabilities) for one in each.candidates] for each in found
            ]
        return [[self._sample(tokens, drawing)] for tokens in read]

    @torch.inference_mode()
    def _sample(self, source: list[int], drawing: SampleOptions) -> Hypothesis:
        if not source:
            return Hypothesis([], 0.0, [])
        read = torch.tensor([source], device=self.device)
        scorer = combine_scorers([Seq2SeqScorer(model, read, None) for model in self.models])
        most = self._limit(source) + 1  # with eos
        return sample(scorer, [[self.special.eos]], most, drawing, self.special, self.device)[0]

    def _translate_tokens(self, sources: Sequence[list[int]], starts: Sequence[list[int]]) -> Iterator[Translation]:
        """Yields the results of sources with eos, in order. An empty one has an empty translation."""
        done = {number: EMPTY_TRANSLATION for number, tokens in enumerate(sources) if not tokens}
        self.empty += len(done)
        given = 0
        batches = self._batches(sources)

        def decode(batch: list[int]) -> list[Translation]:
            return self._decode([sources[number] for number in batch], [starts[number] for number in batch])

        # On the CPU one batch on each thread is faster than all threads on one batch; a GPU has one queue for all.
        in_order = parallel_map if self.device.type == "cpu" else map
        for batch, results in zip(batches, in_order(decode, batches), strict=True):
            done.update(zip(batch, results, strict=True))
            while given in done:
                yield done.pop(given)
                given += 1
        while given in done:
            yield done.pop(given)
            given += 1
        assert given == len(sources), "every line has one result"

    def _with_eos(self, tokens: list[int]) -> list[int]:
        """Appends eos to the tokens of a line, which are truncated if necessary; an empty line stays empty."""
        most = self.max_source_tokens
        if len(tokens) >= most:
            self.truncated += 1
            tokens = tokens[: most - 1]
        return [*tokens, self.source.eos] if tokens else []

    def _batches(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the line numbers of each batch, without empty lines. Long lines come first: they need most memory."""
        sizes = np.array([len(tokens) for tokens in sources], np.int64)
        order = np.argsort(-sizes, kind="stable")[: int((sizes > 0).sum())]
        budget = Budget(max_tokens=self.options.batch_tokens, max_sentences=self.options.batch_sentences, multiple=1)
        return [batch.tolist() for batch in batches_by_tokens(order, sizes, budget)]

    @torch.inference_mode()
    def _decode(self, sources: Sequence[list[int]], starts: Sequence[list[int]]) -> list[Translation]:
        source, padding = pad_rows(sources, self.source.pad)
        given = padding.to(self.device) if bool(padding.any()) else None
        source = source.to(self.device)
        scorers = [Seq2SeqScorer(model, source, given) for model in self.models]
        scorer = combine_scorers([GraphScorer(one) for one in scorers] if self.options.graphs else scorers)
        limits = [self._limit(tokens) for tokens in sources]
        prefixes = pad_rows(starts, self.special.pad)[0].to(self.device) if any(starts) else None
        first = torch.full((len(sources),), self.special.eos, device=self.device)
        request = SearchRequest(first, torch.tensor(limits), prefixes)
        found = beam_search(scorer, request, self.options, self.special)
        return [
            Translation([self._candidate(tokens, one) for one in hypotheses])
            for tokens, hypotheses in zip(sources, found, strict=True)
        ]

    def _limit(self, source: Sequence[int]) -> int:
        """How many tokens a translation has at most, without eos."""
        limit = int(self.options.max_len_a * len(source) + self.options.max_len_b)
        return limit if self.max_target_tokens is None else min(limit, self.max_target_tokens - 1)

    def _candidate(self, source: list[int], found: Hypothesis) -> Candidate:
        alignment = align(self.alignment_model, [source], [found.tokens])[0] if self.alignments else None
        text = post_process(self.target.decode(found.tokens), self.options.remove_bpe)
        return Candidate(text, *found, alignment)


def _smallest(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
