"""Compares the outputs of exported files with those of the model.

Graphs that read whole sequences are called with other batches and lengths than the traced ones, with padding before,
after and inside the rows. Steps are called one after the other from the first token on, and compared with streaming.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from subquad.interop.export.graphs import ExportGraph
from subquad.models import LanguageModel, Model, Seq2Seq
from subquad.nn.block import Block

TOLERANCE = 1e-4
"""The largest difference that is allowed, relative to the largest value if that is above 1."""
SHAPES = ((1, 1), (3, 7), (2, 67), (1, 131))
"""Batches and lengths. They are below and above the sizes of windows, blocks and landmarks, and no multiples."""
ROWS, MORE_STEPS = 2, 8

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""A function that runs a file: inputs by name -> outputs by name."""


def check_graphs(graphs: Sequence[ExportGraph], calls: Mapping[str, Call], model: Model) -> None:
    """Raises a ValueError if a file does not compute what the model computes. calls: by the names of the graphs."""
    for graph in graphs:
        if graph.name == "step":
            assert isinstance(model, Seq2Seq | LanguageModel)
            check_steps(graph, calls, model)
        else:
            check_graph(graph, calls[graph.name], vocab_size(model))


@torch.no_grad()
def check_graph(graph: ExportGraph, call: Call, vocab: int, at_padding: bool = True) -> None:
    """Checks a graph without a state. at_padding: whether what it computes of padding is compared, too."""
    generator = torch.Generator().manual_seed(0)
    for batch, time in SHAPES:
        time = min(time, *graph.limits.values()) if graph.limits else time
        given = {}
        for name, example in graph.inputs.items():
            shape = [batch, *(time if isinstance(axis, str) else axis for axis in graph.shapes[name][1:])]
            given[name] = random_input(example, shape, vocab, generator)
        found, wanted = call(given), graph.module(*given.values())
        for name, value in zip(graph.outputs, wanted, strict=True):
            chosen = found[name]
            if not at_padding and graph.shapes[name][:2] == ("batch", "time") and chosen.shape == value.shape:
                counts = given["padding"].logical_not()
                chosen, value = chosen[counts], value[counts]
            compare(f"{graph.name}: {name} of {batch} rows of {time}", chosen, value)


@torch.no_grad()
def check_steps(graph: ExportGraph, calls: Mapping[str, Call], model: Seq2Seq | LanguageModel) -> None:
    """Checks the graph of a step, together with the encoder if there is one.

    It reads more tokens than any window or chunk of the model has.
    """
    sizes = [cast(Block, block).mixer.max_step or 1 for block in model.decoder.blocks]
    steps = min(2 * max(sizes) + MORE_STEPS, *graph.limits.values()) if graph.limits else 2 * max(sizes) + MORE_STEPS
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
    state = initial_state(graph, ROWS, chunks=steps)
    for number, token in enumerate(tokens.unbind(1)):
        found = calls["step"]({"token": token, **state, **memory})
        wanted = read(token[:, None], **own)
        own = {"state": wanted.state}
        compare(f"step {number + 1}: logits", found["logits"], wanted.logits[:, 0])
        state = {name: found[f"next.{name}"] for name in state}


def initial_state(graph: ExportGraph, rows: int, chunks: int) -> dict[str, Tensor]:
    """Returns the state before the first token. chunks: the room for summaries of chunks, if the model has them."""
    sizes = {"batch": rows, "past": 0, "chunks": chunks}
    return {
        name: torch.full(
            [axis if isinstance(axis, int) else sizes[axis] for axis in graph.shapes[name]],
            start,
            dtype=graph.inputs[name].dtype,
        )
        for name, start in graph.starts.items()
    }


def random_input(example: Tensor, shape: Sequence[int], vocab: int, generator: torch.Generator) -> Tensor:
    """Returns random pixels or tokens, or random padding that never covers the middle of a row."""
    if example.is_floating_point():
        return torch.randn(tuple(shape), generator=generator)
    if example.dtype == torch.bool:
        padding = torch.rand(tuple(shape), generator=generator) < 0.3
        padding[:, shape[1] // 2] = False
        return padding
    return torch.randint(0, vocab, tuple(shape), generator=generator)


def vocab_size(model: Model) -> int:
    """Returns the size of the vocabulary that a model reads. For images it is 1."""
    return getattr(model.config, "source_vocab", getattr(model.config, "vocab", 1))


def compare(what: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise ValueError(
            f"{what} have the shape {tuple(found.shape)} instead of {tuple(wanted.shape)}; no file was kept"
        )
    difference = float((found.double() - wanted.double()).abs().max())
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    if not difference <= limit:
        raise ValueError(f"{what} differ from the model's by {difference:.2g}, more than {limit:.2g}; no file was kept")
