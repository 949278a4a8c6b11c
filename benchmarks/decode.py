"""Speed of decoding, one token after the other, against its targets; every ratio is of times of one run.

    python -m benchmarks.decode --json docs/decoding.json           all parts that need no data
    python -m benchmarks.decode --only language --quick             one part, at toy sizes: shows that it works

Parts: translation (beam search with streaming states against the same search without), language (greedy, one text at a
time, against what memory allows; weights of a byte), rows (linear maps of a few rows against torch's own), growth (time
and memory of a token by position), and with --run RUN --source FILE --references FILE also run (a trained translation
model on a test set).
Models have random weights, except that of a run. Times are medians of repeats that are interleaved over what is
compared. A time is printed only for a result that was checked; the exit code is 1 when a check failed.
"""

import argparse
import gzip
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.measured import MEGABYTE, Effort, Result, measuring_parser, side_by_side
from benchmarks.runner import Part, run_parts
from subquad.compare.measure.checks import relative_distance
from subquad.decode.beam import SearchRequest, SpecialTokens, beam_search
from subquad.decode.inference import prepare_for_inference
from subquad.decode.options import DecodeOptions
from subquad.decode.scoring import Scorer, Seq2SeqScorer, TokenScores
from subquad.decode.translate import Translator
from subquad.kernels.vocabulary import largest
from subquad.mixers import available, mixer_class
from subquad.models import LanguageModel, Seq2Seq, build_model
from subquad.nn.stack import StackState
from subquad.train.run import load_trained

SYMBOLS = SpecialTokens(pad=1, eos=2, unk=3)
TITLES = {
    "translation": "time of a token without streaming states over that with them",
    "language-float32": "time that memory needs to read the weights once, over that of a token",
    "language-int8": "time of a token of the plain float32 model over that with int8 weights",
    "rows": "time of a step with torch's linear maps over that with maps for a few rows",
    "growth": "time of a token at the later position over that at the earlier",
    "growth-state": "bytes of the state at the later position over those at the earlier",
    "run": "tokens a second with float32 weights over those with int8",
    "run-int8": "perplexity of the references with int8 weights over that with float32",
}

# ---------------------------------------------------------------------- translation


class WholeScorer:
    """Scores as Seq2SeqScorer does, without a state: every step reads the target from its beginning."""

    def __init__(self, model: Seq2Seq, source: Tensor) -> None:
        self.model, self.context = model, model.encode(source).x
        self.tokens = torch.empty(len(source), 0, dtype=torch.int64)
        self.keeps_rows = False

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        context = self.context.repeat_interleave(len(tokens) // len(self.context), 0)
        x = self.model.features(self.tokens, context).x
        return TokenScores.of(self.model.head(x[:, -1]), temperature)

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        self.tokens = self.tokens[index]
        self.context = self.context if contexts is None else self.context[contexts]


@torch.inference_mode()
def translation(effort: Effort) -> Iterator[Result]:
    """Beam search of a fixed length over two sentences."""
    time_, beam, size = (4, 2, {"vocab": 50, "dim": 32}) if effort.quick else (64, 4, {"vocab": 8000, "dim": 512})
    torch.manual_seed(0)
    sizes = {"source_vocab": size["vocab"], "target_vocab": size["vocab"], "dim": size["dim"]}
    model = cast(Seq2Seq, build_model("lightconv_iwslt_de_en", **sizes).eval())
    source = torch.randint(4, size["vocab"], (2, time_ // 2))
    options = DecodeOptions(beam=beam, min_len=time_, max_len_b=time_)
    request = SearchRequest(torch.full((2,), SYMBOLS.eos), torch.full((2,), time_))

    def search(scorer: Callable[[], Scorer]) -> list[list[int]]:
        found = beam_search(scorer(), request, options, SYMBOLS)
        return [sentence[0].tokens for sentence in found]

    fast = prepare_for_inference(model, "float32")
    scorers: dict[str, Callable[[], Scorer]] = {
        "without state": lambda: WholeScorer(model, source),
        "streaming": lambda: Seq2SeqScorer(model, source, None),
        "streaming, prepared": lambda: Seq2SeqScorer(fast, source, None),
    }
    labels = {"model": "lightconv_iwslt_de_en", "sentences": 2, "beam": beam, "tokens": time_}
    expected = search(scorers["without state"])
    for name in ("streaming", "streaming, prepared"):
        if search(scorers[name]) != expected:
            yield Result("translation", labels, reason=f"{name}: other hypotheses than without a state")
            return
    seconds = side_by_side({name: partial(search, scorer) for name, scorer in scorers.items()}, effort)
    per_token = {name: one["median"] / time_ for name, one in seconds.items()}
    numbers = {f"{name} ms": value * 1e3 for name, value in per_token.items()}
    score = per_token["without state"] / per_token["streaming, prepared"]
    yield Result("translation", labels, numbers, score, ("at least", 5.0), seconds=seconds)


# ---------------------------------------------------------------------- language


def language_model(mixer: str, size: tuple[int, int, int], **options: Any) -> LanguageModel:
    """size: layers, width, words."""
    torch.manual_seed(0)
    layers, dim, vocab = size
    stack = {"layers": layers, "ffn_dim": 4 * dim, "heads": 8, "norm": "pre", "mixer": {"name": mixer, **options}}
    return cast(LanguageModel, build_model("language-model", vocab=vocab, dim=dim, decoder=stack).eval())


def greedy(model: LanguageModel, count: int, state: StackState | None = None) -> tuple[list[int], StackState]:
    """`count` tokens after the first, and the state."""
    state, token, said = state or model.init_state(1), torch.full((1, 1), SYMBOLS.eos), []
    for _ in range(count):
        found = model(token, state=state)
        assert found.state is not None
        state, token = found.state, largest(found.logits[0], 1)[1]
        said.append(int(token))
    return said, state


@torch.inference_mode()
def language(effort: Effort) -> Iterator[Result]:
    """Greedy decoding of one text with six layers of width 512 and 32,000 words."""
    count, size = (4, (6, 32, 100)) if effort.quick else (32, (6, 512, 32_000))
    for mixer in ("lightconv", "softmax"):
        model = language_model(mixer, size)
        models = {
            "plain": model,
            "float32": prepare_for_inference(model, "float32"),
            "int8": prepare_for_inference(model, "int8"),
        }
        weights = sum(parameter.numel() for parameter in model.parameters())
        filler = torch.zeros(weights)  # as many bytes as the weights; read, they leave no weight in a cache
        labels = {"mechanism": mixer, "weights MB": round(4 * weights / MEGABYTE)}
        texts = torch.randint(4, model.config.vocab, (4, 4 * count))
        logits = {name: one(texts).logits for name, one in models.items()}
        error = relative_distance(logits["float32"], logits["plain"])
        if error > 1e-5:
            yield Result("language-float32", labels, reason=f"logits of the float32 form are off by {error:.1e}")
            continue
        seconds = side_by_side(
            {
                "read": filler.sum,
                **{name: partial(greedy, one, count) for name, one in models.items()},
            },
            effort,
        )
        bound = seconds["read"]["median"]
        per_token = {name: seconds[name]["median"] / count for name in models}
        rates = {f"{name} tokens/s": 1 / value for name, value in per_token.items()}
        numbers = {"GB/s read": 4 * weights / bound / 1e9, "bound tokens/s": 1 / bound, **rates}
        score = bound / per_token["float32"]
        yield Result("language-float32", labels, numbers, score, ("at least", 0.6), seconds=seconds)
        quality = {
            "relative error of logits": relative_distance(logits["int8"], logits["plain"]),
            "same best token": float((logits["int8"].argmax(-1) == logits["plain"].argmax(-1)).float().mean()),
        }
        score = per_token["plain"] / per_token["int8"]
        yield Result("language-int8", labels, {**rates, **quality}, score, ("at least", 2.5), seconds=seconds)


@torch.inference_mode()
def rows(effort: Effort) -> Iterator[Result]:
    """One step of several texts at once, with torch's own linear maps and with those for a few rows."""
    size = (2, 32, 100) if effort.quick else (6, 512, 10_000)
    for mixer in ("lightconv", "softmax"):
        model = language_model(mixer, size)
        models = {"plain": model, "float32": prepare_for_inference(model, "float32")}
        for count in (1, 5, 16):
            tokens = torch.full((count, 1), SYMBOLS.eos)
            state = model(tokens.expand(-1, 8), state=model.init_state(count)).state
            logits = {name: one(tokens, state=state).logits for name, one in models.items()}
            labels = {"mechanism": mixer, "rows": count}
            error = relative_distance(logits["float32"], logits["plain"])
            if error > 1e-5:
                yield Result("rows", labels, reason=f"logits of the float32 form are off by {error:.1e}")
                continue
            steps = {name: lambda one=one: one(tokens, state=state) for name, one in models.items()}  # noqa: B023
            seconds = side_by_side(steps, effort)
            medians = {name: one["median"] for name, one in seconds.items()}
            numbers = {f"{name} ms": 1e3 * value for name, value in medians.items()}
            yield Result("rows", labels, numbers, medians["plain"] / medians["float32"], seconds=seconds)


# ---------------------------------------------------------------------- growth

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"window": 64},
    "eva": {"window": 64, "chunk_size": 64},
    "performer": {"features": 64},
}


@torch.inference_mode()
def growth(effort: Effort) -> Iterator[Result]:
    """Every token up to the later position is decoded, by two layers of width 256; then each position's next one."""
    early, late, stretch = (8, 32, 4) if effort.quick else (256, 4096, 64)
    size = (2, 32, 100) if effort.quick else (2, 256, 1000)
    for mixer in available():
        if not mixer_class(mixer).capabilities.causal:
            continue
        kept = mixer_class(mixer).capabilities.state
        model = prepare_for_inference(language_model(mixer, size, **OPTIONS.get(mixer, {})), "float32")
        _, first = greedy(model, early)
        _, last = greedy(model, late - early, first)
        states = {early: first, late: last}
        seconds: dict[int, list[float]] = {early: [], late: []}
        for _ in range(stretch):  # in turns: a machine that slows down for a while slows both down
            for end, state in states.items():
                start = time.perf_counter()
                greedy(model, 1, state)
                seconds[end].append(time.perf_counter() - start)
        times = {end: statistics.median(each) for end, each in seconds.items()}
        held = {end: state_bytes(state) for end, state in states.items()}
        labels = {"mechanism": mixer, "state": kept}
        constant = "O(1)" in kept
        numbers = {f"ms at {end}": value * 1e3 for end, value in times.items()}
        yield Result("growth", labels, numbers, times[late] / times[early], ("at most", 1.3) if constant else None)
        numbers = {f"KB at {end}": value / 1e3 for end, value in held.items()}
        score = held[late] / max(1, held[early])
        yield Result("growth-state", labels, numbers, score, ("at most", 1.0) if constant else None)


def state_bytes(state: StackState) -> int:
    """Bytes that a state keeps alive, also of tensors that its own are parts of."""
    storages = [one.untyped_storage() for one in state.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ---------------------------------------------------------------------- a trained run


def lines_of(path: Path) -> list[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def trained(run: Path, source: Path, references: Path, effort: Effort) -> Iterator[Result]:
    """Translation of a test set, and what rounding the weights does to the probability of its references."""
    loaded = load_trained(run)
    model = cast(Seq2Seq, loaded.model)
    tokenizers = loaded.tokenizer("source"), loaded.tokenizer("target")
    texts, wanted = lines_of(source), lines_of(references)
    if effort.quick:
        texts, wanted = texts[:8], wanted[:8]
    options = DecodeOptions(beam=5, max_len_a=1.2, max_len_b=10, batch_sentences=128, batch_tokens=10**9)
    made: dict[str, int] = {}

    def translate(name: str, translator: Translator) -> None:
        made[name] = sum(len(one.candidates[0].tokens) for one in translator.translate(texts))

    kinds: tuple[Any, ...] = ("float32", "int8")
    translators = {
        name: Translator([model], *tokenizers, options.model_copy(update={"weights": name})) for name in kinds
    }
    seconds = side_by_side({name: partial(translate, name, one) for name, one in translators.items()}, effort)
    rates = {name: made[name] / seconds[name]["median"] for name in kinds}
    labels = {"sentences": len(texts), "beam": 5, "sentences a batch": 128}
    numbers = {f"{name} tokens/s": value for name, value in rates.items()}
    yield Result("run", labels, numbers, rates["float32"] / rates["int8"], seconds=seconds)
    perplexities = {name: perplexity(prepare_for_inference(model, name), *tokenizers, texts, wanted) for name in kinds}
    numbers = {f"{name} perplexity": value for name, value in perplexities.items()}
    yield Result("run-int8", labels, numbers, perplexities["int8"] / perplexities["float32"])


@torch.inference_mode()
def perplexity(model: Seq2Seq, source: Any, target: Any, texts: Sequence[str], wanted: Sequence[str]) -> float:
    """Of the references, one sentence at a time."""
    total, count = 0.0, 0
    for text, reference in zip(texts, wanted, strict=True):
        ids = torch.tensor([[*source.encode(text), source.eos]])
        words = torch.tensor([target.eos, *target.encode(reference), target.eos])
        scores = model(ids, words[None, :-1]).logits[0].log_softmax(-1)
        total -= float(scores.gather(1, words[1:, None]).sum())
        count += len(words) - 1
    return float(torch.tensor(total / count).exp())


# ---------------------------------------------------------------------- the run of a benchmark

PARTS: dict[str, Part] = {
    "translation": translation,
    "language": language,
    "rows": rows,
    "growth": growth,
}
MARKER = "make bench-decode"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    parts = {name: PARTS[name] for name in options.only or PARTS if name in PARTS}
    if options.run is not None:
        parts["run"] = lambda effort: trained(options.run, options.source, options.references, effort)
    return run_parts(options, parts, TITLES, MARKER)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", [*PARTS, "run"], repeats=5, budget=20.0)
    parser.add_argument("--run", type=Path, help="folder of a trained translation model, to be measured as well")
    parser.add_argument("--source", type=Path, metavar="FILE", help="lines to translate with it, plain or .gz")
    parser.add_argument("--references", type=Path, metavar="FILE", help="their translations, for perplexity")
    options = parser.parse_args(arguments)
    if options.threads < 1 or options.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    if "run" in (options.only or ()) and options.run is None:
        parser.error("--only run needs --run RUN")
    if options.run is not None and (options.source is None or options.references is None):
        parser.error("--run needs --source FILE and --references FILE")
    return options


if __name__ == "__main__":
    sys.exit(main())
