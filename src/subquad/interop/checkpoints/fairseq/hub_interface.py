"""Models that translate or continue text, with the interface of fairseq's hub objects (`GeneratorHubInterface`).

    model = subquad.load_run("runs/iwslt").hub()        # a run of any origin
    model = from_pretrained("checkpoints", ...)         # a checkpoint of fairseq (hub.py)

    model.translate("Hello world !", beam=5)
    model.generate(model.encode("Hello world !"), nbest=2)[0]["tokens"]
    model.sample("My fellow", sampling=True, sampling_topk=10)      # a language model
    model.score("My fellow citizens")["positional_scores"]

Decoding is that of `Translator` and `Generator`; only names and forms are fairseq's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, cast

import torch
from torch import Tensor, nn

from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.fairseq import MosesTokenizer, post_process
from subquad.decode.generate import Generator
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.translate import Translator
from subquad.models import LanguageModel, Seq2Seq

OURS = {
    "unkpen": "unk_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "max_sentences": "batch_sentences",
    "max_tokens": "batch_tokens",
}
"""Options of generation that have another name here."""
SAMPLING = {"sampling_topk": "top_k", "sampling_topp": "top_p", "temperature": "temperature", "seed": "seed"}
"""Options of sampling, which `sampling=True` asks for. fairseq's -1 means no limit."""

Texts = str | Sequence[str]
Tokens = Tensor | Sequence[int]


class HubHypothesis(TypedDict):
    """tokens: with eos, int64; of a language model the prompt comes first. positional_scores: of the new tokens."""

    tokens: Tensor
    score: float
    positional_scores: Tensor


class HubInterface(nn.Module):
    """A model or an ensemble with its tokenizers. `to`, `cuda`, `half` and `eval` apply to all models."""

    def __init__(
        self,
        models: Sequence[Seq2Seq] | Sequence[LanguageModel],
        tokenizers: Mapping[str, Tokenizer],
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> None:
        """tokenizers: of `source` and `target`, or of `text`."""
        super().__init__()
        self.models = nn.ModuleList(models)
        self.source = tokenizers["source"] if "source" in tokenizers else tokenizers["text"]
        self.target = tokenizers["target"] if "target" in tokenizers else tokenizers["text"]
        self.source_lang, self.target_lang = source_lang, target_lang
        self._decoder: tuple[DecodeOptions, Translator | Generator] | None = None
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def translates(self) -> bool:
        """Whether it translates; a language model continues text instead."""
        return isinstance(self.models[0], Seq2Seq)

    # ------------------------------------------------------------------ text to text

    def translate(self, sentences: Texts, beam: int = 5, **options: Any) -> Any:
        """The best translation of a sentence, or of each of a list; with nbest > 1 a list of so many.

        options: of the recipe's section `decode`, or of sampling (see `sample`), also under fairseq's names.
        """
        if not self.translates:
            raise ValueError("a language model does not translate; `sample` continues text")
        return self._decode_texts("translate", sentences, beam, options)

    def sample(self, sentences: Texts, beam: int = 1, **options: Any) -> Any:
        """The translation or continuation of a sentence, or of each of a list, by default greedily.

        options: as for `translate`. sampling=True draws tokens at random, with sampling_topk, sampling_topp,
        temperature and seed.
        """
        return self._decode_texts("sample", sentences, beam, options)

    def _decode_texts(self, owner: str, sentences: Texts, beam: int, options: Mapping[str, Any]) -> Any:
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        found = self._search(owner, self.source.encode_batch(texts), beam, options)
        several = options.get("nbest", 1) > 1
        said = [[self.target.decode(one.tokens) for one in hypotheses] for hypotheses in found]
        results = said if several else [one[0] for one in said]
        return results[0] if isinstance(sentences, str) else results

    # ------------------------------------------------------------------ tokens to hypotheses

    def generate(self, tokens: Tokens | Sequence[Tokens], beam: int = 5, **options: Any) -> Any:
        """The hypotheses of a sentence of token ids, the best first, or of each of a list of sentences.

        tokens: as `encode` gives them; every hypothesis is a `HubHypothesis`. options: as for `translate`; there are
        nbest hypotheses, by default as many as the beam has.
        """
        single = isinstance(tokens, Tensor) or (len(tokens) > 0 and isinstance(tokens[0], int))
        given = cast(Sequence[Tokens], [tokens] if single else tokens)
        rows = [_without_eos(one, self.source.eos) for one in given]
        found = self._search("generate", rows, beam, {"nbest": beam, **options})
        results = [[_to_dict(one) for one in hypotheses] for hypotheses in found]
        return results[0] if single else results

    def score(self, sentences: Texts, targets: Texts | None = None) -> Any:
        """The log-probabilities of a sentence's tokens and eos, as a `HubHypothesis`, or of each of a list.

        A model of translation scores `targets`, the translations of the sentences. score: their mean.
        """
        if (targets is not None) != self.translates:
            raise ValueError(
                "a model of translation scores translations: give the sentences and `targets`"
                if self.translates
                else "a language model scores sentences alone, without `targets`"
            )
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        references = [targets] if isinstance(targets, str) else list(texts if targets is None else targets)
        if len(texts) != len(references):
            raise ValueError(f"there are {len(texts)} sentences and {len(references)} targets")
        found = [self._score(text, reference) for text, reference in zip(texts, references, strict=True)]
        return found[0] if isinstance(sentences, str) else found

    @torch.inference_mode()
    def _score(self, text: str, reference: str) -> HubHypothesis:
        target = torch.tensor([*self.target.encode(reference), self.target.eos])
        read = torch.cat([target[-1:], target[:-1]])[None].to(self.device)
        source = self.encode(text)[None].to(self.device)
        logs = []
        for model in self.models:
            logits = model(source, read).logits if self.translates else model(read).logits
            logs.append(logits[0].float().log_softmax(-1))
        mean = torch.logsumexp(torch.stack(logs), 0) - math.log(len(logs))
        scores = mean.gather(1, target[:, None].to(mean.device)).squeeze(1).cpu()
        return {"tokens": target, "score": float(scores.mean()), "positional_scores": scores}

    # ------------------------------------------------------------------ sentences and tokens

    def encode(self, sentence: str) -> Tensor:
        """The token ids of a source sentence, with eos, (T,) int64."""
        return torch.tensor([*self.source.encode(sentence), self.source.eos])

    def decode(self, tokens: Tokens) -> str:
        """The target sentence of token ids."""
        return self.target.decode(torch.as_tensor(tokens).tolist())

    def tokenize(self, sentence: str) -> str:
        """The sentence with spaces between its words, where Moses splits it; unchanged where it does not."""
        return self.source.split_words(sentence) if isinstance(self.source, MosesTokenizer) else sentence

    def apply_bpe(self, sentence: str) -> str:
        """The pieces of a sentence whose words have spaces between them; unchanged without codes of subword-nmt."""
        if not isinstance(self.source, MosesTokenizer):
            return sentence
        return " ".join(self.source.codes.split_line(sentence))

    def remove_bpe(self, sentence: str) -> str:
        """The words of a sentence in pieces."""
        return post_process(sentence, "subword_nmt")

    # ------------------------------------------------------------------ decoding

    def _search(
        self, owner: str, rows: Sequence[list[int]], beam: int, options: Mapping[str, Any]
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sentences of source tokens without eos."""
        given = {OURS.get(name, name): value for name, value in options.items()}
        drawing = None
        if given.pop("sampling", False):
            wanted = {ours: given.pop(name) for name, ours in SAMPLING.items() if name in given}
            limits = {"top_k": (0, 0), "top_p": (0.0, 1.0)}
            unlimited = {name: none for name, (lowest, none) in limits.items() if wanted.get(name, 1) <= lowest}
            drawing = SampleOptions.parse(f"{owner} with sampling", wanted | unlimited)
        chosen = DecodeOptions.parse(owner, {"beam": max(beam, given.get("nbest", 1)), **given})
        decoder = self._build_decoder(chosen)
        if isinstance(decoder, Generator):
            return _continue(decoder, rows, drawing)
        return decoder.search_tokens(rows, drawing)

    def _build_decoder(self, options: DecodeOptions) -> Translator | Generator:
        if self._decoder is None or self._decoder[0] != options:
            models: Any = list(self.models)
            built = (
                Translator(models, self.source, self.target, options)
                if self.translates
                else Generator(models, self.source, options)
            )
            self._decoder = (options, built)
        return self._decoder[1]

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """Forgets the decoder, because `to`, `cuda` and `half`, which call this, move the models."""
        self._decoder = None
        return super()._apply(*arguments, **options)


def _continue(generator: Generator, rows: Sequence[list[int]], drawing: SampleOptions | None) -> list[list[Hypothesis]]:
    """Continuations of prompts, one by one, since each has a limit of its own; their tokens begin with the prompt."""
    options, found = generator.options, []
    for row in rows:
        text = [generator.special.eos, *row]
        new = max(1, int(options.max_len_a * len(text) + options.max_len_b) - len(row))
        if generator.max_tokens is not None:
            new = max(1, min(new, generator.max_tokens - len(text)))
        results = (
            [generator.sample_after([text], new, drawing)[0]]
            if drawing is not None
            else generator.search_after([text], new)[0]
        )
        found.append([Hypothesis([*row, *one.tokens], one.score, one.log_probabilities) for one in results])
    return found


def _without_eos(tokens: Tokens, eos: int) -> list[int]:
    ids = torch.as_tensor(tokens).tolist()
    return ids[:-1] if ids and ids[-1] == eos else ids


def _to_dict(found: Hypothesis) -> HubHypothesis:
    return {
        "tokens": torch.tensor(found.tokens),
        "score": found.score,
        "positional_scores": torch.tensor(found.log_probabilities),
    }
