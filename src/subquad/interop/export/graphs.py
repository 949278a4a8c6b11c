"""The graphs that are exported of a model. They take and return plain tensors, and run without subquad.

    encoder-decoder    encoder   source and its padding        ->  the state of cross-attention
                       step      a token, that state, state    ->  logits of the next token, state
    language model     model     tokens and their padding      ->  logits of the next token at every position
                       step      a token, state                ->  logits of the next token, state
    masked             model     tokens and their padding      ->  logits of the word at every position
    classifiers        model     tokens and padding, or images ->  logits of the classes

Batch and length may have any size; images have the size that the model was trained on. Padding is True at positions to
ignore. `step.py` has the graphs of decoding, and `files.py` writes and checks the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from subquad.decode.limits import max_text_length
from subquad.models import LanguageModel, MaskedLanguageModel, Model, Pyramid, TextClassifier, VisionTransformer
from subquad.models.base import ModelOutput

Shape = tuple[int | str, ...]
"""The sizes of axes. A name stands for any size, which is the same wherever the name occurs."""

EXAMPLE_BATCH, EXAMPLE_TIME = 2, 150
"""The shape of the traced example. The exported graph must not depend on it."""
MAX_AXIS = 2**31 - 1


@dataclass(frozen=True)
class ExportGraph:
    """A graph to export.

    inputs: example tensors by name, in order. shapes: those of inputs and outputs, by name. limits: the largest sizes
    of named axes that have a limit. starts: the numbers that fill the tensors of a state before the first token.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    shapes: dict[str, Shape]
    outputs: tuple[str, ...]
    limits: dict[str, int] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)


class LogitsOnly(nn.Module):
    """A model that returns only its logits. It takes tokens and padding, or images."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> tuple[Tensor]:
        """given: images, or tokens and their padding."""
        found: ModelOutput = self.model(given[0], padding=given[1]) if len(given) > 1 else self.model(*given)
        return (found.logits,)


def text_graph(model: LanguageModel | MaskedLanguageModel | TextClassifier) -> ExportGraph:
    """Returns the graph that reads whole texts."""
    limit = max_text_length(model)
    tokens = torch.zeros(EXAMPLE_BATCH, example_length(limit), dtype=torch.int64)
    logits_shape: Shape = ("batch", "time", model.config.vocab)
    if isinstance(model, TextClassifier):
        logits_shape = ("batch", model.config.num_classes)
    return ExportGraph(
        "model",
        LogitsOnly(model),
        {"tokens": tokens, "padding": torch.zeros_like(tokens, dtype=torch.bool)},
        {"tokens": ("batch", "time"), "padding": ("batch", "time"), "logits": logits_shape},
        ("logits",),
        axis_limit("time", limit),
    )


def image_graph(model: VisionTransformer | Pyramid, image_size: int) -> ExportGraph:
    """Returns the graph of an image classifier. image_size: the side of the images in pixels."""
    shape = (model.config.channels, image_size, image_size)
    shapes: dict[str, Shape] = {"images": ("batch", *shape), "logits": ("batch", model.config.num_classes)}
    return ExportGraph("model", LogitsOnly(model), {"images": torch.zeros(EXAMPLE_BATCH, *shape)}, shapes, ("logits",))


def example_length(limit: int | None) -> int:
    return EXAMPLE_TIME if limit is None else min(limit, EXAMPLE_TIME)


def axis_limit(axis: str, limit: int | None) -> dict[str, int]:
    return {axis: limit} if limit is not None else {}


# ---------------------------------------------------------------------- tracing


def trace(graph: ExportGraph) -> ExportedProgram:
    """Traces a graph. It must work for every size of its named axes, and must not contain operations of subquad."""
    dims = {
        name: Dim(name, min=0 if name == "past" else 1, max=graph.limits.get(name, MAX_AXIS))
        for name in dict.fromkeys(axis for name in graph.inputs for axis in graph.shapes[name] if isinstance(axis, str))
        if graph.limits.get(name) != 1  # an axis with only one size is fixed
    }
    dynamic_shapes = tuple(
        {number: dims[axis] for number, axis in enumerate(graph.shapes[name]) if axis in dims} for name in graph.inputs
    )
    with torch.no_grad():
        # What torch cannot prove for all sizes is checked when the graph runs; `check.py` tries many sizes before that.
        program = torch.export.export(
            graph.module,
            tuple(graph.inputs.values()),
            dynamic_shapes=(dynamic_shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    for node in _nodes(program.graph_module):
        if node.op == "call_function" and "subquad" in str(node.target):  # weights have names of ours too
            raise ValueError(f"{graph.name}: the graph contains {node.target}, which needs subquad to run")
        node.meta.pop("stack_trace", None)  # it contains paths of this machine
    return program


def _nodes(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Returns the nodes of a graph and of the graphs inside it."""
    return [
        node for module in module.modules() if isinstance(module, torch.fx.GraphModule) for node in module.graph.nodes
    ]


def describe_graph(graph: ExportGraph) -> Mapping[str, Any]:
    """Returns the inputs and outputs of a graph as plain data, for export.json."""
    inputs = [
        {"name": name, "dtype": str(example.dtype).removeprefix("torch."), "shape": list(graph.shapes[name])}
        | ({"start": graph.starts[name]} if name in graph.starts else {})
        for name, example in graph.inputs.items()
    ]
    outputs = [{"name": name, "shape": list(graph.shapes[name])} for name in graph.outputs]
    return {"inputs": inputs, "outputs": outputs, "largest": graph.limits}
