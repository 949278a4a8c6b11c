"""What of a model is exported: graphs of plain tensors that run without subquad.

    encoder-decoder    encoder   source, its padding           ->  what cross-attention remembers of it
                       step      a token, memory, state        ->  logits of the next token, state
    language model     model     tokens, their padding         ->  logits of the next token at every position
                       step      a token, state                ->  logits of the next token, state
    masked             model     tokens, their padding         ->  logits of the word at every position
    classifiers        model     tokens and padding, or images ->  logits of the classes

Batch and length are free; images have the size that the model was trained on. Padding is True where there is no token.
`export_step.py` has the steps, `export_files.py` writes and checks the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from subquad.decode.limits import longest_text
from subquad.models import LanguageModel, MaskedLanguageModel, Model, Pyramid, TextClassifier, VisionTransformer
from subquad.models.base import Output

Shape = tuple[int | str, ...]
"""Sizes of axes; a name stands for any size, the same wherever it occurs."""

EXAMPLE_BATCH, EXAMPLE_TIME = 2, 150
"""Shape of what is traced. Nothing that is exported may depend on it."""
LARGEST_AXIS = 2**31 - 1


@dataclass(frozen=True)
class Part:
    """One graph. inputs: examples by name, in order; shapes: of inputs and outputs by name; limits: the largest sizes
    of named axes that have one; starts: what state tensors are filled with before the first token."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    shapes: dict[str, Shape]
    outputs: tuple[str, ...]
    limits: dict[str, int] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)


class Whole(nn.Module):
    """A model whose forward takes tokens and padding, or images, and which gives logits alone."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> tuple[Tensor]:
        """given: images, or tokens and their padding."""
        found: Output = self.model(given[0], padding=given[1]) if len(given) > 1 else self.model(*given)
        return (found.logits,)


def whole_of_text(model: LanguageModel | MaskedLanguageModel | TextClassifier) -> Part:
    most = longest_text(model)
    tokens = torch.zeros(EXAMPLE_BATCH, example_time(most), dtype=torch.int64)
    of_logits: Shape = ("batch", "time", model.config.vocab)
    if isinstance(model, TextClassifier):
        of_logits = ("batch", model.config.classes)
    return Part(
        "model",
        Whole(model),
        {"tokens": tokens, "padding": torch.zeros_like(tokens, dtype=torch.bool)},
        {"tokens": ("batch", "time"), "padding": ("batch", "time"), "logits": of_logits},
        ("logits",),
        limits_of("time", most),
    )


def whole_of_images(model: VisionTransformer | Pyramid, image_size: int) -> Part:
    """image_size: side of the images in pixels."""
    shape = (model.config.channels, image_size, image_size)
    shapes: dict[str, Shape] = {"images": ("batch", *shape), "logits": ("batch", model.config.classes)}
    return Part("model", Whole(model), {"images": torch.zeros(EXAMPLE_BATCH, *shape)}, shapes, ("logits",))


def example_time(most: int | None) -> int:
    return EXAMPLE_TIME if most is None else min(most, EXAMPLE_TIME)


def limits_of(axis: str, most: int | None) -> dict[str, int]:
    return {axis: most} if most is not None else {}


# ---------------------------------------------------------------------- tracing


def trace(part: Part) -> ExportedProgram:
    """The graph of a part. It must serve every size of its named axes and hold no operation of ours."""
    dims = {
        name: Dim(name, min=0 if name == "past" else 1, max=part.limits.get(name, LARGEST_AXIS))
        for name in dict.fromkeys(axis for name in part.inputs for axis in part.shapes[name] if isinstance(axis, str))
        if part.limits.get(name) != 1  # what has one size is not open
    }
    free = tuple(
        {number: dims[axis] for number, axis in enumerate(part.shapes[name]) if axis in dims} for name in part.inputs
    )
    with torch.no_grad():
        # What torch cannot prove of all sizes is checked when the graph runs, and with sizes of all sorts before that.
        program = torch.export.export(
            part.module,
            tuple(part.inputs.values()),
            dynamic_shapes=(free,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    for node in _nodes(program.graph_module):
        if "subquad" in str(node.target):
            raise ValueError(f"{part.name}: the graph holds {node.target}, which runs with subquad only")
        node.meta.pop("stack_trace", None)  # it names the files of this machine
    return program


def _nodes(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Of a graph and of those inside it."""
    return [
        node for module in graph.modules() if isinstance(module, torch.fx.GraphModule) for node in module.graph.nodes
    ]


def described(part: Part) -> Mapping[str, Any]:
    """Plain data: what the graph takes and gives, for whoever calls it."""
    inputs = [
        {"name": name, "dtype": str(example.dtype).removeprefix("torch."), "shape": list(part.shapes[name])}
        | ({"start": part.starts[name]} if name in part.starts else {})
        for name, example in part.inputs.items()
    ]
    outputs = [{"name": name, "shape": list(part.shapes[name])} for name in part.outputs]
    return {"inputs": inputs, "outputs": outputs, "largest": part.limits}
