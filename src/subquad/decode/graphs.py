"""Steps of decoding as CUDA graphs: a step is recorded once, and then replayed without Python.

A graph has the addresses of its tensors for good. So the streaming state has a fixed size, and what a step makes of it
is copied into the tensors that it was read from; the tokens and the order of the rows are copied into tensors of the
graph as well. A graph serves until the number of rows changes or the room of the state is used up; then the next step
is recorded anew, which takes as long as a few steps without graphs.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from subquad.decode.scoring import StreamingScorer, TokenScores
from subquad.mixers import State
from subquad.nn.block import BlockState
from subquad.nn.stack import StackState

LEAST_ROOM = 64
"""Tokens that a graph has room for at least."""
WARM_UPS = 2
"""Runs before the recording, in which libraries choose their kernels and allocate what they keep."""

Record = Callable[[Callable[[], None], Callable[[], None]], Callable[[], None]]
"""Takes what a step does and what undoes it, and returns what does it again, with the same tensors."""


def check_graphs(device: torch.device) -> None:
    """Raises ValueError if a device has no CUDA graphs."""
    if device.type != "cuda":
        raise ValueError(f"graphs: the model is on the {device.type}, but CUDA graphs need a GPU; leave out `graphs`")


def record_cuda_graph(run: Callable[[], None], undo: Callable[[], None]) -> Callable[[], None]:
    """Records the work of `run` on the GPU, and returns what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
            undo()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing is computed here
        run()
    return graph.replay


class StepGraph:
    """One step of a scorer for a fixed number of rows."""

    def __init__(
        self, scorer: StreamingScorer, state: StackState, moves: bool, temperature: float, record: Record
    ) -> None:
        """state: of fixed size; the graph writes into it. moves: whether a step begins with another order of rows."""
        self.scorer, self.state, self.moves, self.temperature = scorer, state, moves, temperature
        rows, device = state.lengths.shape[0], state.lengths.device
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.order = torch.arange(rows, device=device)
        before = [tensor.clone() for tensor in _changing_tensors(state)]

        def undo() -> None:
            for tensor, value in zip(_changing_tensors(state), before, strict=True):
                tensor.copy_(value)

        self.replay = record(self._run, undo)

    def _run(self) -> None:
        state = self.state.reorder(self.order) if self.moves else self.state
        self.scores, after = self.scorer.read(self.tokens, state, self.temperature)
        old, new = _changing_tensors(self.state), _changing_tensors(after)
        if [one.shape for one in old] != [one.shape for one in new]:
            raise ValueError("graphs: a mechanism of this model has a state that grows; leave out `graphs`")
        for into, value in zip(old, new, strict=True):
            if into is not value:
                into.copy_(value)

    def step(self, tokens: Tensor, order: Tensor | None) -> TokenScores:
        """Returns scores that are valid until the next step. order: of the rows before it; None: as they are."""
        self.tokens.copy_(tokens)
        if self.moves:
            self.order.copy_(torch.arange(len(tokens), device=tokens.device) if order is None else order)
        self.replay()
        return self.scores


class GraphScorer:
    """Scores as another scorer does, from its second step on with graphs."""

    keeps_rows = True

    def __init__(self, scorer: StreamingScorer, record: Record = record_cuda_graph) -> None:
        self.scorer, self.record = scorer, record
        self.graph: StepGraph | None = None
        self.order: Tensor | None = None  # of the rows, if it changed since the last step
        self.moves = False  # whether rows change places between steps
        self.steps = self.room = 0

    def step(self, tokens: Tensor, temperature: float = 1.0) -> TokenScores:
        self.steps += 1
        if self.steps == 1:  # it reads the context, and has one hypothesis of each sentence
            return self.scorer.step(tokens, temperature)
        if self.graph is None or self.room == 0 or self.moves > self.graph.moves:
            self._record(temperature)
        assert self.graph is not None
        self.room -= 1
        order, self.order = self.order, None
        return self.graph.step(tokens, order)

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> None:
        rows = self.scorer.state.lengths.shape[0]
        self.moves = self.moves or len(index) > rows or (contexts is None and len(index) == rows)
        if self.graph is not None and contexts is None and len(index) == rows:
            self.order = index if self.order is None else self.order[index]
            return
        if self.order is not None:
            self.scorer.reorder(self.order)
        self.scorer.reorder(index, contexts)
        self.graph, self.order = None, None

    def _record(self, temperature: float) -> None:
        """Records a step, with room for as many tokens as have been read, or more."""
        if self.graph is None or self.room == 0:
            self.room = max(LEAST_ROOM, self.steps)
            self.scorer.state = _copy(self.scorer.state.reserve(self.room).with_fixed_size())
        self.graph = None  # the next one can have its memory
        self.graph = StepGraph(self.scorer, self.scorer.state, self.moves, temperature, self.record)


def _tensors(state: State) -> dict[str, Tensor]:
    every = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}


def _changing_tensors(state: StackState) -> list[Tensor]:
    """Returns the tensors that a step changes: all but the contexts."""
    return [state.lengths, *(tensor for layer in state.layers for tensor in _tensors(layer.mixer).values())]


def _copy(state: StackState) -> StackState:
    """Returns a state whose tensors that change are nobody else's, nor parts of others."""
    layers = []
    for layer in state.layers:
        own = {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in _tensors(layer.mixer).items()
        }
        layers.append(BlockState(replace(layer.mixer, **own), layer.cross))
    return StackState(state.lengths.clone(), layers)
