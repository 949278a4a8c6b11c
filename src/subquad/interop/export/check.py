"""Holds exported files against the model that they come from.

Graphs of whole sequences are called with batches and lengths other than those that were traced, rows padded in front,
behind and within. Steps are called one after the other from the first token on, beside the model's own streaming.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from subquad.interop.export.graphs import Part
from subquad.models import LanguageModel, Model, Seq2Seq
from subquad.nn.block import Block

TOLERANCE = 1e-4
"""Largest difference, relative to the largest value where that is above 1."""
SHAPES = ((1, 1), (3, 7), (2, 67), (1, 131))
"""Batches and lengths: below and above windows, blocks and landmarks, and not multiples of them."""
ROWS, MORE_STEPS = 2, 8

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Calls a file: inputs by name -> outputs by name."""


def check_parts(parts: Sequence[Part], calls: Mapping[str, Call], model: Model) -> None:
    """ValueError if a file does not compute what the model computes. calls: of the files, by the names of the parts."""
    for part in parts:
        if part.name == "step":
            assert isinstance(model, Seq2Seq | LanguageModel)
            check_steps(part, calls, model)
        else:
            check_whole(part, calls[part.name], vocabulary(model))


@torch.no_grad()
def check_whole(part: Part, call: Call, words: int) -> None:
    """Of a graph without a state."""
    generator = torch.Generator().manual_seed(0)
    for batch, time in SHAPES:
        time = min(time, *part.limits.values()) if part.limits else time
        given = {}
        for name, example in part.inputs.items():
            shape = [batch, *(time if isinstance(axis, str) else axis for axis in part.shapes[name][1:])]
            given[name] = random_input(example, shape, words, generator)
        found, wanted = call(given), part.module(*given.values())
        for name, value in zip(part.outputs, wanted, strict=True):
            compare(f"{part.name}: {name} of {batch} rows of {time}", found[name], value)


@torch.no_grad()
def check_steps(part: Part, calls: Mapping[str, Call], model: Seq2Seq | LanguageModel) -> None:
    """From the first token on, further than any window or chunk of the model. Of an encoder-decoder, together with its
    encoder."""
    sizes = [cast(Block, block).mixer.max_step or 1 for block in model.decoder.blocks]
    steps = min(2 * max(sizes) + MORE_STEPS, *part.limits.values()) if part.limits else 2 * max(sizes) + MORE_STEPS
    generator = torch.Generator().manual_seed(1)
    words = model.config.target_vocab if isinstance(model, Seq2Seq) else model.config.vocab
    tokens = torch.randint(0, words, (ROWS, steps), generator=generator)
    memory: dict[str, Tensor] = {}
    own: dict[str, Any] = {"state": model.init_state(ROWS)}
    if isinstance(model, Seq2Seq):
        source = torch.randint(0, model.config.source_vocab, (ROWS, 9), generator=generator)
        padding = torch.arange(9) >= torch.tensor([[9], [5]])
        memory = calls["encoder"]({"source": source, "padding": padding})
        own |= {"context": model.encode(source, padding).x, "context_padding": padding}
    read = model.decode if isinstance(model, Seq2Seq) else model
    state = started(part, ROWS, chunks=steps)
    for number, token in enumerate(tokens.unbind(1)):
        found = calls["step"]({"token": token, **state, **memory})
        wanted = read(token[:, None], **own)
        own = {"state": wanted.state}
        compare(f"step {number + 1}: logits", found["logits"], wanted.logits[:, 0])
        state = {name: found[f"next.{name}"] for name in state}


def started(part: Part, rows: int, chunks: int) -> dict[str, Tensor]:
    """What a step is given besides the first token. chunks: room for summaries, where there are any."""
    sizes = {"batch": rows, "past": 0, "chunks": chunks}
    return {
        name: torch.full(
            [axis if isinstance(axis, int) else sizes[axis] for axis in part.shapes[name]],
            start,
            dtype=part.inputs[name].dtype,
        )
        for name, start in part.starts.items()
    }


def random_input(example: Tensor, shape: Sequence[int], words: int, generator: torch.Generator) -> Tensor:
    """Pixels, tokens, or padding that leaves every row its middle position."""
    if example.is_floating_point():
        return torch.randn(tuple(shape), generator=generator)
    if example.dtype == torch.bool:
        padding = torch.rand(tuple(shape), generator=generator) < 0.3
        padding[:, shape[1] // 2] = False
        return padding
    return torch.randint(0, words, tuple(shape), generator=generator)


def vocabulary(model: Model) -> int:
    """Numbers of symbols that a model reads, all at once; images have none."""
    return getattr(model.config, "source_vocab", getattr(model.config, "vocab", 1))


def compare(what: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise ValueError(f"{what} are {tuple(found.shape)} instead of {tuple(wanted.shape)}; no file was kept")
    difference = float((found.double() - wanted.double()).abs().max())
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    if not difference <= limit:
        raise ValueError(f"{what} differ from the model's by {difference:.2g}, more than {limit:.2g}; no file was kept")
