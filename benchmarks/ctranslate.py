"""CTranslate2 beside ours: a trained softmax run is written as a model of its, and both translate the same lines.

    pip install ctranslate2
    python -m benchmarks.ctranslate --run runs/softmax --source test.en

Both have the same weights and tokens, a beam of 5, 128 sentences in a batch and the same number of threads, and take
turns. CTranslate2 may work on batches side by side, as ours does, or with all threads on one batch: the faster counts.
The figures are printed only if at least nine of ten outputs are the same; where they differ, two hypotheses have about
the same score, and the two searches end at different moments.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks.decode import lines_of
from benchmarks.measured import Effort, Result, measuring_parser, side_by_side
from benchmarks.runner import run_parts
from subquad.decode.options import DecodeOptions
from subquad.decode.translate import Translator
from subquad.mixers.softmax import Softmax
from subquad.models import Seq2Seq
from subquad.nn.block import Block
from subquad.nn.heads import WordHead
from subquad.nn.positions import Sinusoids
from subquad.train.run import load_trained

MARKER = "python -m benchmarks.ctranslate"
TITLES = {"ctranslate2": "our tokens a second over those of CTranslate2"}
BEAM, BATCH, LONGEST = 5, 128, 256
SAME = 0.9
"""Outputs that have to agree."""
LEAST_SPEED = 0.8
"""Of CTranslate2's in float32."""
LAYOUTS = {"batches side by side": lambda threads: (threads, 1), "one batch": lambda threads: (1, threads)}
"""Numbers of batches at once and of threads for each, which CTranslate2 calls inter_threads and intra_threads."""

# ---------------------------------------------------------------------- a model of CTranslate2


def save_model(model: Seq2Seq, eos: int, unk: int, folder: Path) -> None:
    """Writes weights and vocabulary; a token is called by its number."""
    import ctranslate2

    check_model(model)
    first = cast(Block, model.encoder.blocks[0])
    layers = len(model.encoder.blocks), len(model.decoder.blocks)
    spec = ctranslate2.specs.TransformerSpec.from_config(
        layers, first.mixer.config.heads, pre_norm=first.pre_norm, activation=ctranslate2.specs.Activation.RELU
    )
    for side, stack, embedding in (
        (spec.encoder, model.encoder, model.source),
        (spec.decoder, model.decoder, model.target),
    ):
        side.scale_embeddings = embedding.config.scale
        table = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        table.weight = cast(nn.Embedding, embedding.table).weight.detach()
        assert isinstance(embedding.positions, Sinusoids)
        side.position_encodings.encodings = embedding.positions(torch.arange(2 * LONGEST)[None])[0]
        if first.pre_norm:
            fill_norm(side.layer_norm, stack.norm)
        for layer, block in zip(side.layer, stack.blocks, strict=True):
            fill_layer(layer, cast(Block, block))
    spec.decoder.projection.weight = cast(WordHead, model.head).weight.detach()
    names = {eos: "</s>", unk: "<unk>"}
    for register, size in (
        (spec.register_source_vocabulary, model.config.source_vocab),
        (spec.register_target_vocabulary, model.config.target_vocab),
    ):
        register([names.get(number, str(number)) for number in range(size)])
    spec.config.decoder_start_token = "</s>"
    spec.validate()
    spec.save(str(folder))


def check_model(model: Seq2Seq) -> None:
    """ValueError unless CTranslate2 knows all that the model consists of."""
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        if not isinstance(block.mixer, Softmax) or block.mixer.config.rotary:
            raise ValueError(f"CTranslate2 has no {block.mixer.name}: take a run of softmax attention")
    if not all(isinstance(one.positions, Sinusoids) for one in (model.source, model.target)):
        raise ValueError("take a run with sinusoidal positions")


def fill_layer(layer: Any, block: Block) -> None:
    fill_norm(layer.self_attention.layer_norm, block.mixer_norm)
    together, out = cast(nn.Linear, block.mixer.qkv), cast(nn.Linear, block.mixer.out)
    fill_map(layer.self_attention.linear[0], together.weight, together.bias)
    fill_map(layer.self_attention.linear[1], out.weight, out.bias)
    if block.cross is not None:
        assert block.cross_norm is not None
        fill_norm(layer.attention.layer_norm, block.cross_norm)
        together, out = cast(nn.Linear, block.cross.qkv), cast(nn.Linear, block.cross.out)
        width = together.weight.shape[0] // 3
        fill_map(layer.attention.linear[0], together.weight[:width], together.bias[:width])
        fill_map(layer.attention.linear[1], together.weight[width:], together.bias[width:])
        fill_map(layer.attention.linear[2], out.weight, out.bias)
    fill_norm(layer.ffn.layer_norm, block.ffn_norm)
    fill_map(layer.ffn.linear_0, block.ffn.fc1.weight, block.ffn.fc1.bias)
    fill_map(layer.ffn.linear_1, block.ffn.fc2.weight, block.ffn.fc2.bias)


def fill_norm(norm: Any, own: Any) -> None:
    norm.gamma, norm.beta = own.weight.detach(), own.bias.detach()


def fill_map(linear: Any, weight: torch.Tensor, bias: torch.Tensor) -> None:
    linear.weight, linear.bias = weight.detach().contiguous(), bias.detach().contiguous()


# ---------------------------------------------------------------------- side by side


def compare(run: Path, source: Path, threads: int, effort: Effort) -> Iterator[Result]:
    loaded = load_trained(run)
    model = cast(Seq2Seq, loaded.model)
    tokenizers = loaded.tokenizer("source"), loaded.tokenizer("target")
    sources = tokenizers[0].encode_batch(lines_of(source)[: 16 if effort.quick else None])
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, tokenizers[1].eos, tokenizers[1].unk, Path(folder))
        for weights in ("float32", "int8"):
            options = DecodeOptions(
                beam=BEAM, max_len_a=0, max_len_b=LONGEST, batch_sentences=BATCH, batch_tokens=10**9, weights=weights
            )
            ours = partial(translate, Translator([model], *tokenizers, options), sources)
            theirs = {
                name: peer(folder, sources, weights, *layout(threads), tokenizers[1].unk)
                for name, layout in LAYOUTS.items()
            }
            yield beside(weights, ours, theirs, effort)


def translate(translator: Translator, sources: Sequence[list[int]]) -> list[list[int]]:
    return [hypotheses[0].tokens[:-1] for hypotheses in translator.search_tokens(sources)]  # without eos


def peer(
    folder: str, sources: Sequence[Sequence[int]], weights: str, batches: int, threads: int, unk: int
) -> Callable[[], list[list[int]]]:
    import ctranslate2

    program = ctranslate2.Translator(
        folder, device="cpu", compute_type=weights, inter_threads=batches, intra_threads=threads
    )
    named = [[*map(str, tokens), "</s>"] for tokens in sources]  # <unk> is unknown under any other name, too

    def run() -> list[list[int]]:
        found = program.translate_batch(named, beam_size=BEAM, max_batch_size=BATCH, max_decoding_length=LONGEST)
        return [[unk if word == "<unk>" else int(word) for word in one.hypotheses[0]] for one in found]

    return run


def beside(
    weights: str, ours: Callable[[], list[list[int]]], theirs: dict[str, Callable[[], list[list[int]]]], effort: Effort
) -> Result:
    expected, outputs = ours(), {name: run() for name, run in theirs.items()}
    count = sum(len(tokens) + 1 for tokens in expected)
    same = min(sum(map(list.__eq__, expected, found)) / len(expected) for found in outputs.values())
    labels = {"weights": weights, "sentences": len(expected), "beam": BEAM, "sentences a batch": BATCH}
    if weights == "float32" and same < SAME:
        return Result("ctranslate2", labels, reason=f"only {same:.1%} of the outputs are the same")
    seconds = side_by_side({"ours": ours, **theirs}, effort)
    rates = {f"{name} tokens/s": count / seconds[name]["median"] for name in ("ours", *theirs)}
    best = max(rates[f"{name} tokens/s"] for name in theirs)
    target = ("at least", LEAST_SPEED) if weights == "float32" else None
    numbers = {**rates, "same outputs": same}
    return Result("ctranslate2", labels, numbers, rates["ours tokens/s"] / best, target, seconds=seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    part = partial(compare, options.run, options.source, options.threads)
    return run_parts(options, {"ctranslate2": part}, TITLES, MARKER)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", ["ctranslate2"], repeats=5, budget=60.0)
    parser.add_argument("--run", type=Path, required=True, help="folder of a trained translation model with softmax")
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="lines to translate, plain or .gz")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
