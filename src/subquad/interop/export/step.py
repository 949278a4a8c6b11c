"""Decoding as graphs: an encoder that gives what cross-attention remembers, and a step that reads one token a row.

The step takes the streaming state as named tensors and gives it back for the next call:

    lengths               (batch,) int64, tokens that each row has read; begins with 0
    state.LAYER.FIELD     what the mixer of a layer remembers; begins filled with one number, which `starts` has
    source_lengths        (batch,) int64, and
    cross.LAYER.FIELD     what the encoder gives; steps read it, and it stays the same

Axis `past` has the tokens read so far, none at the beginning: mechanisms that keep all keys make it longer by one with
each step. Axis `chunks` is room for summaries of EVA's chunks, which the caller chooses: a step finds the same room
as it leaves. Tokens / chunk_size summaries are enough; without room for one, logits become NaN.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from subquad.decode.limits import longest_source, longest_text
from subquad.interop.export.graphs import EXAMPLE_BATCH, Part, Shape, example_time, limits_of
from subquad.mixers import Mixer, State
from subquad.mixers.eva import EVAState
from subquad.models import LanguageModel, Seq2Seq
from subquad.nn.block import Block, BlockState
from subquad.nn.stack import StackState

Decoding = Seq2Seq | LanguageModel
EXAMPLE_STEPS, EXAMPLE_CHUNKS = 3, 3


def decoding_parts(model: Decoding) -> list[Part]:
    """The step, and for an encoder-decoder the encoder before it."""
    time = example_time(longest_source(model)) if isinstance(model, Seq2Seq) else 0
    state = _example(model, time, EXAMPLE_STEPS)
    memory, of_memory = _memory(state), _shapes(_memory(state), _memory(_example(model, time - 1, 1)), "source_time")
    of_state = _shapes(_own(state), _own(_example(model, time, EXAMPLE_STEPS - 1)), "past")
    _make_room(state, of_state)
    step = Part(
        "step",
        Step(model, state),
        {"token": torch.zeros_like(state.lengths), **_own(state), **memory},
        {"token": ("batch",), "logits": ("batch", _words(model)), **of_state, **of_memory}
        | {f"next.{name}": _grown(shape) for name, shape in of_state.items()},
        ("logits", *(f"next.{name}" for name in of_state)),
        limits_of("past", longest_text(model)),
        _starts(model.init_state(1)),
    )
    return [_encoder(model, of_memory), step] if isinstance(model, Seq2Seq) else [step]


def _encoder(model: Seq2Seq, of_memory: dict[str, Shape]) -> Part:
    most = longest_source(model)
    source = torch.zeros(EXAMPLE_BATCH, example_time(most), dtype=torch.int64)
    of_source: Shape = ("batch", "source_time")
    return Part(
        "encoder",
        Encoder(model),
        {"source": source, "padding": torch.zeros_like(source, dtype=torch.bool)},
        {"source": of_source, "padding": of_source, **of_memory},
        tuple(of_memory),
        limits_of("source_time", most),
    )


# ---------------------------------------------------------------------- the graphs


class Encoder(nn.Module):
    """source, padding (batch, source_time) -> source_lengths, then cross.LAYER.FIELD."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        source, padding = given
        context = self.model.encode(source, padding).x
        query = context.new_zeros(context.shape[0], 1, context.shape[2])  # nobody looks at what it reads
        memories = []
        for block in self.model.decoder.blocks:
            cross = cast(Mixer, cast(Block, block).cross)
            empty = cross.init_state(EXAMPLE_BATCH)
            memories.append(cross(query, context=context, context_padding=padding, state=empty).state)
        return padding.logical_not().sum(1), *_named("cross", memories).values()


class Step(nn.Module):
    """token (batch,), lengths (batch,), state.LAYER.FIELD, source_lengths, cross.LAYER.FIELD -> logits (batch, words),
    the next lengths, the next state.LAYER.FIELD."""

    def __init__(self, model: Decoding, pattern: StackState) -> None:
        """pattern: a state with the types of all, and with whatever in them is no tensor."""
        super().__init__()
        self.model, self.pattern = model, pattern

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        token, lengths, *rest = given
        state = self._state(lengths, iter(rest))
        read = self.model.decode if isinstance(self.model, Seq2Seq) else self.model
        logits, after, _ = read(token[:, None], state=state)
        assert after is not None
        return self._nan_without_room(logits[:, 0], state), *_own(after).values()

    def _state(self, lengths: Tensor, given: Iterator[Tensor]) -> StackState:
        mixers = [_filled(layer.mixer, lengths, given) for layer in self.pattern.layers]
        crosses: list[State | None] = [None] * len(mixers)
        if isinstance(self.model, Seq2Seq):
            source_lengths = next(given)
            crosses = [_filled(cast(State, layer.cross), source_lengths, given) for layer in self.pattern.layers]
        for mixer, size in self._chunked(mixers):  # as if so much had been read that the room stays as it is
            mixer.seen = mixer.chunk_k.shape[2] * size - 1
        return StackState(lengths, [BlockState(mixer, cross) for mixer, cross in zip(mixers, crosses, strict=True)])

    def _nan_without_room(self, logits: Tensor, state: StackState) -> Tensor:
        """NaN in rows that look for a summary which had no room."""
        for mixer, size in self._chunked([layer.mixer for layer in state.layers]):
            full = state.lengths >= (mixer.chunk_k.shape[2] + 1) * size
            logits = logits.masked_fill(full[:, None], float("nan"))
        return logits

    def _chunked(self, mixers: Sequence[State]) -> Iterator[tuple[EVAState, int]]:
        """States with summaries of chunks, and the tokens of a chunk."""
        for state, block in zip(mixers, self.model.decoder.blocks, strict=True):
            size = cast(Block, block).mixer.max_step
            if isinstance(state, EVAState) and size is not None:
                yield state, size


# ---------------------------------------------------------------------- states as named tensors


def _tensors(state: State) -> dict[str, Tensor]:
    """Everything but the lengths, which all layers share."""
    every = {one.name: getattr(state, one.name) for one in fields(state)}
    return {name: value for name, value in every.items() if isinstance(value, Tensor) and name != "lengths"}


def _named(prefix: str, states: Sequence[State]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{number}.{name}": value
        for number, state in enumerate(states)
        for name, value in _tensors(state).items()
    }


def _own(state: StackState) -> dict[str, Tensor]:
    """What steps change."""
    return {"lengths": state.lengths, **_named("state", [layer.mixer for layer in state.layers])}


def _memory(state: StackState) -> dict[str, Tensor]:
    """What steps read of the source; nothing without one."""
    crosses = [layer.cross for layer in state.layers if layer.cross is not None]
    return {"source_lengths": crosses[0].lengths, **_named("cross", crosses)} if crosses else {}


def _filled(pattern: State, lengths: Tensor, given: Iterator[Tensor]) -> State:
    """A state like the pattern, with the next tensors."""
    content: dict[str, Any] = {name: next(given) for name in _tensors(pattern)}
    return replace(pattern, lengths=lengths, **content)


# ---------------------------------------------------------------------- examples, and what they say about shapes


@torch.no_grad()
def _example(model: Decoding, source_time: int, steps: int) -> StackState:
    """The state after some steps."""
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


def _shapes(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor], axis: str) -> dict[str, Shape]:
    """Shapes whose first axis is the batch, and in which `axis` is what differs between the two examples."""
    return {
        name: ("batch", *(a if a == b else axis for a, b in zip(tensor.shape[1:], others[name].shape[1:], strict=True)))
        for name, tensor in tensors.items()
    }


def _make_room(state: StackState, shapes: dict[str, Shape]) -> None:
    """Gives the example room for summaries of chunks, on an axis of their own."""
    for number, layer in enumerate(state.layers):
        if isinstance(layer.mixer, EVAState):
            for name in ("chunk_k", "chunk_v"):
                batch, heads, _, width = getattr(layer.mixer, name).shape
                setattr(layer.mixer, name, torch.zeros(batch, heads, EXAMPLE_CHUNKS, width))
                shapes[f"state.{number}.{name}"] = ("batch", heads, "chunks", width)


def _grown(shape: Shape) -> Shape:
    return tuple("past + 1" if axis == "past" else axis for axis in shape)


def _starts(state: StackState) -> dict[str, float]:
    """The number that fills each tensor before the first token."""
    starts = {}
    for name, tensor in _own(state).items():
        values = tensor.unique().tolist()
        assert len(values) <= 1, f"{name} begins with several values"
        starts[name] = float(values[0]) if values else 0.0
    return starts


def _words(model: Decoding) -> int:
    return model.config.target_vocab if isinstance(model, Seq2Seq) else model.config.vocab
