"""Evaluates a trained language model with lm-evaluation-harness (`pip install 'subquad[lm-eval]'`).

    import lm_eval
    from subquad.interop.lm_eval import SubquadLM
    lm_eval.simple_evaluate(model=SubquadLM("runs/wikitext2"), tasks=["lambada_openai"])

Importing this module also registers the model as `subquad`, with the argument `run`. The harness's command line knows
only its own models, so this module is also that command with ours:

    python -m subquad.interop.lm_eval --model subquad --model_args run=runs/wikitext2 --tasks lambada_openai

Texts are read as in training: a
line break becomes the eos of a line, and a text begins after an eos. Generated text ends with its line.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from subquad.decode.beam import pad_rows
from subquad.decode.generate import Generator
from subquad.decode.options import SampleOptions
from subquad.models import LanguageModel
from subquad.tasks.language_model import LanguageModelData
from subquad.train.run import load_trained

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NEW_TOKENS = 256
"""The number of tokens to generate if a task does not say it."""

Score = tuple[float, bool]
"""The log-probability of a continuation, and whether greedy decoding would give it."""


@register_model("subquad")
class SubquadLM(TemplateLM):
    """A run of language modelling with the interface of the harness: scores of continuations and texts, generation."""

    def __init__(
        self,
        run: str | Path,
        checkpoint: str = "best",
        batch_size: int | str = 16,
        max_batch_size: int | None = None,  # noqa: ARG002 - the harness passes it to every model
        device: str | None = None,
    ) -> None:
        super().__init__()
        loaded = load_trained(run, checkpoint)
        if not isinstance(loaded.model, LanguageModel):
            raise ValueError(f"{run} is a run of task {loaded.recipe.task}; the harness needs a language model")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a number of texts, got {batch_size!r}")
        self.batch_size, self._device = int(batch_size), torch.device(device) if device else loaded.device
        self.model = loaded.model.to(self._device)
        self.words = loaded.tokenizer("text")
        self.generator = Generator([self.model], self.words)
        assert isinstance(loaded.data, LanguageModelData)
        self.max_length = loaded.data.blocks.tokens_per_sample

    @property
    def eot_token_id(self) -> int:
        return self.words.eos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002
        """Returns the token ids of a text. A line break becomes eos."""
        first, *rest = self.words.encode_batch(string.split("\n"))
        return first + [token for line in rest for token in (self.words.eos, *line)]

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Score]:
        """Scores requests (texts, ids of the context, ids of the continuation). A long context loses its beginning."""
        order = sorted(range(len(requests)), key=lambda number: -sum(map(len, requests[number][1:])))
        found: dict[int, Score] = {}
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            found.update(zip(chosen, self._score([requests[number][1:] for number in chosen]), strict=True))
        for number, (texts, *_rest) in enumerate(requests):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[number])
        return [found[number] for number in range(len(requests))]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        if (longest := max(len(said) for _, said in pairs)) > self.max_length:
            raise ValueError(f"a continuation of {longest} tokens is longer than the {self.max_length} of a sample")
        rows = [(context + said)[-self.max_length - 1 :] for context, said in pairs]
        tokens = pad_rows([row[:-1] for row in rows], self.words.pad)[0].to(self._device)
        logits = self.model(tokens).logits.float()  # padding is after the rows, where a causal model does not see it
        scores = []
        for (_, said), row, values in zip(pairs, rows, logits, strict=True):
            logs = values[len(row) - 1 - len(said) : len(row) - 1].log_softmax(-1)
            target = torch.tensor(said, device=self._device)
            chosen = logs.gather(1, target[:, None])
            scores.append((float(chosen.sum()), bool((logs.argmax(-1) == target).all())))
        return scores

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Returns the log-probabilities of whole texts. Every token counts once, in pieces that the model can read."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.max_length, 1)
            pieces = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pieces)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Returns continuations up to the first of the strings in `until`, or to the end of the line."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        found: dict[int, str] = {}
        for options, numbers in groups.items():
            for start in range(0, len(numbers), self.batch_size):
                chosen = numbers[start : start + self.batch_size]
                said = self._continue_texts([requests[number].args[0] for number in chosen], json.loads(options))
                found.update(zip(chosen, said, strict=True))
        for number, text in found.items():
            self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [found[number] for number in range(len(requests))]

    def _continue_texts(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        tokens = int(options.get("max_gen_toks", NEW_TOKENS))
        room = self.max_length - tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={tokens} leaves no room for a context in samples of {self.max_length} tokens"
            )
        texts = [[self.eot_token_id, *self.tok_encode(context)][-room:] for context in contexts]
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample", False) else 0.0
        drawing = SampleOptions(temperature=temperature, top_p=float(options.get("top_p", 1.0)))
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        return [_cut_at_stops(found.text, stops) for found in self.generator.sample_after(texts, tokens, drawing)]


def _cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first of the strings that end it."""
    return text[: min([len(text), *(place for stop in stops if stop and (place := text.find(stop)) >= 0)])]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
