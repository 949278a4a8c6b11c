"""The graphs of decoding: an encoder that returns the state of cross-attention, and a step that reads a token per row.

The step takes the streaming state as named tensors and returns it for the next call:

    lengths               (batch,) int64, the number of tokens that each row has read; it begins with 0
    state.LAYER.FIELD     the state of the mixer of a layer; it begins filled with one number, which `starts` has
    source_lengths        (batch,) int64, and
    cross.LAYER.FIELD     what the encoder returns; all steps read it, and it does not change

Axis `past` counts the tokens that were read, and is 0 at the beginning. Mechanisms that keep all keys make it longer by
one with each step. Axis `chunks` is the room for summaries of EVA's chunks. The caller chooses it, and it does not
change. It must be at least tokens / chunk_size; if a summary has no room, the logits become NaN.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from subquad.decode.limits import max_source_length, max_text_length
from subquad.interop.export.graphs import EXAMPLE_BATCH, ExportGraph, Shape, axis_limit, example_length
from subquad.mixers import Mixer, State
from subquad.mixers.eva import EVAState
from subquad.models import LanguageModel, Seq2Seq
from subquad.nn.block import Block, BlockState
from subquad.nn.stack import StackState

Decoding = Seq2Seq | LanguageModel
EXAMPLE_STEPS, EXAMPLE_CHUNKS = 3, 3


def decoding_graphs(model: Decoding) -> list[ExportGraph]:
    """Returns the graph of a step and, for an encoder-decoder, the graph of the encoder before it."""
    time = example_length(max_source_length(model)) if isinstance(model, Seq2Seq) else 0
    state = _example_state(model, time, EXAMPLE_STEPS)
    shorter_source, fewer_steps = _example_state(model, time - 1, 1), _example_state(model, time, EXAMPLE_STEPS - 1)
    memory = _context_tensors(state)
    memory_shapes = _infer_shapes(memory, _context_tensors(shorter_source), "source_time")
    sizes = StepSizes(_vocab_size(model), max_text_length(model))
    step = step_graph(Step(model, state), (model.init_state(1), fewer_steps, state), sizes, memory, memory_shapes)
    return [_encoder_graph(model, memory_shapes), step] if isinstance(model, Seq2Seq) else [step]


class StepSizes(NamedTuple):
    """limit: the most tokens of a text; None: any number."""

    vocab: int
    limit: int | None


def step_graph(
    module: "Step",
    states: tuple[StackState, StackState, StackState],
    sizes: StepSizes,
    memory: Mapping[str, Tensor] = {},
    memory_shapes: Mapping[str, Shape] = {},
) -> ExportGraph:
    """Returns the graph of a step. states: before the first token, after some tokens, and after one more.

    memory: tensors about the source.
    """
    begin, before, state = states
    shapes = _infer_shapes(_state_tensors(state), _state_tensors(before), "past")
    _add_chunk_axis(state, shapes)
    return ExportGraph(
        "step",
        module,
        {"token": torch.zeros_like(state.lengths), **_state_tensors(state), **memory},
        {"token": ("batch",), "logits": ("batch", sizes.vocab), **shapes, **memory_shapes}
        | {f"next.{name}": _next_shape(shape) for name, shape in shapes.items()},
        ("logits", *(f"next.{name}" for name in shapes)),
        axis_limit("past", sizes.limit),
        _start_values(begin),
    )


def _encoder_graph(model: Seq2Seq, memory_shapes: dict[str, Shape]) -> ExportGraph:
    limit = max_source_length(model)
    source = torch.zeros(EXAMPLE_BATCH, example_length(limit), dtype=torch.int64)
    source_shape: Shape = ("batch", "source_time")
    return ExportGraph(
        "encoder",
        Encoder(model),
        {"source": source, "padding": torch.zeros_like(source, dtype=torch.bool)},
        {"source": source_shape, "padding": source_shape, **memory_shapes},
        tuple(memory_shapes),
        axis_limit("source_time", limit),
    )


# ---------------------------------------------------------------------- the graphs


class Encoder(nn.Module):
    """source and padding (batch, source_time) -> source_lengths, then cross.LAYER.FIELD."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        source, padding = given
        context = self.model.encode(source, padding).x
        query = context.new_zeros(context.shape[0], 1, context.shape[2])  # its output is not used
        memories = []
        for block in self.model.decoder.blocks:
            cross = cast(Mixer, cast(Block, block).cross)
            empty = cross.init_state(EXAMPLE_BATCH)
            memories.append(cross(query, context=context, context_padding=padding, state=empty).state)
        return padding.logical_not().sum(1), *_named_tensors("cross", memories).values()


class Step(nn.Module):
    """Reads one token of each row.

    token (batch,), lengths (batch,), state.LAYER.FIELD, source_lengths, cross.LAYER.FIELD -> logits (batch, vocab), the
    next lengths, the next state.LAYER.FIELD.
    """

    def __init__(self, model: Decoding, pattern: StackState) -> None:
        """pattern: an example of the state, which has its classes and everything in it that is no tensor."""
        super().__init__()
        self.model, self.pattern = model, pattern

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        token, lengths, *rest = given
        state = self._state(lengths, iter(rest))
        logits, after = self.read(token[:, None], state)
        return _nan_without_room(logits[:, 0], state), *_state_tensors(after).values()

    def read(self, token: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        """Returns the logits (batch, 1, vocab) after token (batch, 1), and the next state."""
        read = self.model.decode if isinstance(self.model, Seq2Seq) else self.model
        logits, after, _ = read(token, state=state)
        assert after is not None
        return logits, after

    def _state(self, lengths: Tensor, given: Iterator[Tensor]) -> StackState:
        mixers = [_build_state(layer.mixer, lengths, given) for layer in self.pattern.layers]
        crosses: list[State | None] = [None] * len(mixers)
        if isinstance(self.model, Seq2Seq):
            source_lengths = next(given)
            crosses = [_build_state(cast(State, layer.cross), source_lengths, given) for layer in self.pattern.layers]
        for mixer, size in _with_chunks(mixers):  # as if so many tokens were read that the chunks fill the room
            mixer.seen = mixer.chunk_k.shape[2] * size - 1
        return StackState(lengths, [BlockState(mixer, cross) for mixer, cross in zip(mixers, crosses, strict=True)])


def _nan_without_room(logits: Tensor, state: StackState) -> Tensor:
    """Returns the logits, with NaN in rows that need a summary which had no room."""
    for mixer, size in _with_chunks([layer.mixer for layer in state.layers]):
        full = state.lengths >= (mixer.chunk_k.shape[2] + 1) * size
        logits = logits.masked_fill(full[:, None], float("nan"))
    return logits


def _with_chunks(mixers: Sequence[State]) -> Iterator[tuple[EVAState, int]]:
    """Yields the states that have summaries of chunks, and the number of tokens of a chunk."""
    for state in mixers:
        if isinstance(state, EVAState):
            yield state, state.q.shape[2] + 1


# ---------------------------------------------------------------------- states as named tensors


def _tensors(state: State) -> dict[str, Tensor]:
    """Returns the tensors of a state except the lengths, which all layers share."""
    every = {one.name: getattr(state, one.name) for one in fields(state)}
    return {name: value for name, value in every.items() if isinstance(value, Tensor) and name != "lengths"}


def _named_tensors(prefix: str, states: Sequence[State]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{number}.{name}": value
        for number, state in enumerate(states)
        for name, value in _tensors(state).items()
    }


def _state_tensors(state: StackState) -> dict[str, Tensor]:
    """Returns the tensors that steps change, by name."""
    return {"lengths": state.lengths, **_named_tensors("state", [layer.mixer for layer in state.layers])}


def _context_tensors(state: StackState) -> dict[str, Tensor]:
    """Returns the tensors about the source, by name; a language model has none."""
    crosses = [layer.cross for layer in state.layers if layer.cross is not None]
    return {"source_lengths": crosses[0].lengths, **_named_tensors("cross", crosses)} if crosses else {}


def _build_state(pattern: State, lengths: Tensor, given: Iterator[Tensor]) -> State:
    """Returns a state like the pattern, with the next of the given tensors."""
    content: dict[str, Any] = {name: next(given) for name in _tensors(pattern)}
    return replace(pattern, lengths=lengths, **content)


# ---------------------------------------------------------------------- examples, and the shapes that follow from them


@torch.no_grad()
def _example_state(model: Decoding, source_time: int, steps: int) -> StackState:
    """Returns the state after some steps."""
    state, token = model.init_state(EXAMPLE_BATCH), torch.zeros(EXAMPLE_BATCH, 1, dtype=torch.int64)
    context = padding = None
    if isinstance(model, Seq2Seq):
        source = torch.zeros(EXAMPLE_BATCH, source_time, dtype=torch.int64)
        padding = torch.zeros_like(source, dtype=torch.bool)
        context = model.encode(source, padding).x
    for _ in range(steps):
        if isinstance(model, Seq2Seq):
            found = model.decode(token, context, context_padding=padding, state=state)
        else:
            found = model(token, state=state)
        assert found.state is not None
        state, context, padding = found.state, None, None
    return state


def _infer_shapes(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor], axis: str) -> dict[str, Shape]:
    """Returns shapes whose first axis is the batch. Sizes that differ between the two examples are called `axis`."""
    return {
        name: ("batch", *(a if a == b else axis for a, b in zip(tensor.shape[1:], others[name].shape[1:], strict=True)))
        for name, tensor in tensors.items()
    }


def _add_chunk_axis(state: StackState, shapes: dict[str, Shape]) -> None:
    """Gives the example room for summaries of chunks, and a name to that axis."""
    for number, layer in enumerate(state.layers):
        if isinstance(layer.mixer, EVAState):
            for name in ("chunk_k", "chunk_v"):
                batch, heads, _, width = getattr(layer.mixer, name).shape
                setattr(layer.mixer, name, torch.zeros(batch, heads, EXAMPLE_CHUNKS, width))
                shapes[f"state.{number}.{name}"] = ("batch", heads, "chunks", width)


def _next_shape(shape: Shape) -> Shape:
    return tuple("past + 1" if axis == "past" else axis for axis in shape)


def _start_values(state: StackState) -> dict[str, float]:
    """Returns the number that fills each tensor before the first token."""
    starts = {}
    for name, tensor in _state_tensors(state).items():
        values = tensor.unique().tolist()
        assert len(values) <= 1, f"{name} begins with several values"
        starts[name] = float(values[0]) if values else 0.0
    return starts


def _vocab_size(model: Decoding) -> int:
    return model.config.target_vocab if isinstance(model, Seq2Seq) else model.config.vocab
