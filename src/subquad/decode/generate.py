"""Continues prompts with a language model: by sampling, greedily, or by beam search."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from subquad.data.tokenizers import Tokenizer
from subquad.decode.beam import SearchRequest, beam_search, pad_rows, special_tokens
from subquad.decode.graphs import GraphScorer, check_graphs
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.inference import prepare_for_inference
from subquad.decode.limits import max_text_length
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.sample import sample
from subquad.decode.scoring import LanguageModelScorer, Scorer, combine_scorers
from subquad.models import LanguageModel
from subquad.models.base import compile_blocks


class Continuation(NamedTuple):
    """text: the prompt and its continuation. tokens: the new tokens. score: the sum of their log-probabilities, which
    beam search divides by length^lenpen."""

    text: str
    tokens: list[int]
    score: float
    log_probabilities: list[float]


class Generator:
    """Continues texts with one model, or with the mean probability of several models."""

    def __init__(
        self, models: Sequence[LanguageModel], tokenizer: Tokenizer, options: DecodeOptions | None = None
    ) -> None:
        """options: those of beam search; `weights`, `compile` and `graphs` always apply.

        Methods take the limits of length.
        """
        for model in models:
            if model.config.vocab != tokenizer.size:
                raise ValueError(f"the tokenizer has {tokenizer.size} tokens, but the model has {model.config.vocab}")
        self.options, self.tokenizer, self.special = options or DecodeOptions(), tokenizer, special_tokens(tokenizer)
        self.models = [prepare_for_inference(model, self.options.weights) for model in models]
        if self.options.compile:
            for model in self.models:
                compile_blocks(model)
        self.device = next(models[0].parameters()).device
        if self.options.graphs:
            check_graphs(self.device)
        self.max_tokens = min((most for model in models if (most := max_text_length(model)) is not None), default=None)

    def sample(self, prompts: Sequence[str], tokens: int, options: SampleOptions) -> list[Continuation]:
        """Samples at most `tokens` tokens after each prompt, or fewer if the model ends the text."""
        return self.sample_after(self._encode(prompts, tokens), tokens, options)

    @torch.inference_mode()
    def sample_after(self, texts: Sequence[list[int]], tokens: int, options: SampleOptions) -> list[Continuation]:
        """Samples as `sample` does, after texts of at least one token each."""
        found = sample(self._scorer(texts), texts, tokens, options, self.special, self.device)
        return [self._to_continuation(text, one) for text, one in zip(texts, found, strict=True)]

    def search(self, prompts: Sequence[str], tokens: int) -> list[list[Continuation]]:
        """Returns the `nbest` best continuations of each prompt, found by beam search, of at most `tokens` tokens."""
        return self.search_after(self._encode(prompts, tokens + 1), tokens)

    @torch.inference_mode()
    def search_after(self, texts: Sequence[list[int]], tokens: int) -> list[list[Continuation]]:
        """Searches as `search` does, after texts of at least one token each."""
        first = torch.tensor([text[-1] for text in texts], device=self.device)
        request = SearchRequest(first, torch.full((len(texts),), tokens))
        found = beam_search(self._scorer(texts), request, self.options, self.special)
        return [
            [self._to_continuation(text, one) for one in several] for text, several in zip(texts, found, strict=True)
        ]

    def _encode(self, prompts: Sequence[str], tokens: int) -> list[list[int]]:
        """Returns the tokens of the prompts. A text begins with eos, as in training."""
        texts = [[self.tokenizer.eos, *ids] for ids in self.tokenizer.encode_batch(prompts)]
        longest = max(map(len, texts)) + tokens - 1
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(
                f"a prompt of {longest - tokens} tokens and {tokens} more exceed the {self.max_tokens} that the "
                "model can read; ask for fewer, or shorten the prompt"
            )
        return texts

    def _scorer(self, texts: Sequence[Sequence[int]]) -> Scorer:
        read, padding = pad_rows([text[:-1] for text in texts], self.special.pad)
        given = padding.to(self.device) if bool(padding.any()) else None
        read = read.to(self.device)
        scorers = [LanguageModelScorer.after(model, read, given) for model in self.models]
        return combine_scorers([GraphScorer(one) for one in scorers] if self.options.graphs else scorers)

    def _to_continuation(self, text: list[int], found: Hypothesis) -> Continuation:
        return Continuation(self.tokenizer.decode([*text, *found.tokens]), *found)
