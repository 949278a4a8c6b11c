"""Exports models of transformers whose attention was swapped, such as those that `subquad linearise` writes.

    causal language model    model     tokens and their padding      ->  logits of the next token at every position
                             step      a token, state                ->  logits of the next token, state
    other models of text     model     tokens and their padding      ->  logits
    models of images         model     images                        ->  logits of the classes

The files are those of runs (see graphs.py and step.py). Layers that keep attention have keys and values as their state,
with the axis `past`. What turns text or images into inputs is copied from the model's folder.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.interop.export.card import CARD
from subquad.interop.export.check import MORE_STEPS, ROWS, Call, check_graph, compare, initial_state
from subquad.interop.export.files import Form, write_graphs
from subquad.interop.export.graphs import EXAMPLE_BATCH, ExportGraph, Shape, axis_limit, example_length
from subquad.interop.export.step import EXAMPLE_STEPS, Step, StepSizes, step_graph
from subquad.interop.export.usage import usage
from subquad.interop.patching import load_swapped
from subquad.interop.patching.between import AttentionBetween
from subquad.interop.patching.transformers_hosts import TransformersAttention
from subquad.mixers import Mixer, State
from subquad.nn.block import BlockState
from subquad.nn.stack import StackState

INPUT_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*processor_config.json")
"""Files of transformers that turn text or images into inputs."""


def export_swapped(folder: Path, form: Form, out: Path) -> list[str]:
    """Writes the graphs of a saved model into a folder, which must be new or empty. Returns the names of the files."""
    model = load_swapped(folder).float().eval()
    graphs = swapped_graphs(model)

    def add(temporary: Path) -> None:
        (temporary / CARD).write_text(_card(model, folder, usage(form, graphs, _end(model))), encoding="utf-8")
        for path in {path for pattern in INPUT_FILES for path in folder.glob(pattern)}:
            shutil.copy(path, temporary / path.name)

    return write_graphs(graphs, form, out, type(model).__name__, partial(_check, graphs, model), add)


def swapped_graphs(model: Any) -> list[ExportGraph]:
    """Returns the graphs of a swapped model."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        images = torch.zeros(EXAMPLE_BATCH, model.config.num_channels, side, side)
        shapes: dict[str, Shape] = {
            "images": ("batch", *images.shape[1:]),
            "logits": ("batch", model.config.num_labels),
        }
        return [ExportGraph("model", SwappedLogits(model), {"images": images}, shapes, ("logits",))]
    tokens = torch.zeros(EXAMPLE_BATCH, example_length(limit), dtype=torch.int64)
    given = {"tokens": tokens, "padding": torch.zeros_like(tokens, dtype=torch.bool)}
    with torch.no_grad():
        found = SwappedLogits(model)(*given.values())[0]
    shapes = dict.fromkeys(given, ("batch", "time"))
    shapes["logits"] = ("batch", *(["time"] if found.dim() == 3 else []), found.shape[-1])
    whole = ExportGraph("model", SwappedLogits(model), given, shapes, ("logits",), axis_limit("time", limit))
    return [whole, _step_graph(model, limit)] if model.can_generate() else [whole]


class SwappedLogits(nn.Module):
    """A model of transformers that returns only its logits. It takes tokens and padding, or images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> tuple[Tensor]:
        if len(given) == 1:
            return (self.model(pixel_values=given[0]).logits,)
        tokens, padding = given
        options = {"use_cache": False} if self.model.can_generate() else {}
        return (self.model(input_ids=tokens, attention_mask=padding.logical_not().long(), **options).logits,)


# ---------------------------------------------------------------------- a step


@dataclass
class KeysValues(State):
    """What a layer that keeps attention knows of earlier tokens: (batch, heads, past, d) each."""

    keys: Tensor
    values: Tensor


class SwappedStep(Step):
    """Reads one token of each row, with the states of mixers in transformers' cache."""

    model: Any

    def read(self, token: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        states = [layer.mixer for layer in state.layers]
        cache = _cache_of(states)
        past = max((one.keys.shape[2] for one in states if isinstance(one, KeysValues)), default=0)
        seen = torch.ones(token.shape[0], 1, 1, past + 1, dtype=torch.bool)  # a mask of 4 axes is taken as it is
        found = self.model(
            input_ids=token,
            position_ids=state.lengths[:, None],
            attention_mask=seen,
            past_key_values=cache,
            use_cache=True,
        )
        return found.logits, _state_of(found.past_key_values, state.lengths + 1)


def _step_graph(model: Any, limit: int | None) -> ExportGraph:
    """Returns the graph of a step of a causal language model."""
    fewer, state = (_example_state(model, steps) for steps in (EXAMPLE_STEPS - 1, EXAMPLE_STEPS))
    mixers = _mixers_by_layer(model)
    begin: list[State] = []
    for number, layer in enumerate(state.layers):
        if isinstance(layer.mixer, KeysValues):
            none = layer.mixer.keys[:1, :, :0]
            begin.append(KeysValues(torch.zeros(1, dtype=torch.int64), none, none))
        else:
            begin.append(mixers[number].init_state(1, torch.device("cpu"), torch.float32))
    first = StackState(torch.zeros(1, dtype=torch.int64), [BlockState(one, None) for one in begin])
    return step_graph(SwappedStep(model, state), (first, fewer, state), StepSizes(model.config.vocab_size, limit))


@torch.no_grad()
def _example_state(model: Any, steps: int) -> StackState:
    """Returns the state after some tokens."""
    tokens = torch.zeros(EXAMPLE_BATCH, steps, dtype=torch.int64)
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    return _state_of(cache, torch.full((EXAMPLE_BATCH,), steps))


def _mixers_by_layer(model: nn.Module) -> dict[int, Mixer]:
    """Returns the mixers of a model by the numbers of their layers in a cache."""
    found: dict[int, Mixer] = {}
    for module in model.modules():
        between = getattr(module, "subquad", None)
        if isinstance(between, AttentionBetween):
            found[int(module.layer_idx)] = between.mixer  # type: ignore[arg-type]
        elif isinstance(module, TransformersAttention) and module.layer is not None:
            found[module.layer] = module.mixer
    return found


def _state_of(cache: Any, lengths: Tensor) -> StackState:
    """Returns what a cache of transformers holds."""
    from subquad.interop.patching.cache import StateLayer

    states: list[State] = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, StateLayer):
            assert layer.state is not None
            states.append(layer.state)
        elif layer.is_sliding:
            raise ValueError(f"layer {number} keeps attention in a sliding window, whose cache cannot be exported")
        else:
            states.append(KeysValues(lengths, layer.keys, layer.values))
    return StackState(lengths, [BlockState(state, None) for state in states])


def _cache_of(states: list[State]) -> Any:
    """Returns a cache of transformers that holds these states."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    from subquad.interop.patching.cache import StateLayer

    cache = DynamicCache()
    for state in states:
        layer = DynamicLayer()
        if isinstance(state, KeysValues):
            layer.lazy_initialization(state.keys, state.values)
            layer.keys, layer.values = state.keys, state.values
        else:
            layer = StateLayer()
            layer.state = state
        cache.layers.append(layer)
    return cache


# ---------------------------------------------------------------------- the check, and the card


@torch.no_grad()
def _check(graphs: list[ExportGraph], model: Any, calls: Mapping[str, Call]) -> None:
    """Compares whole passes with the model's, and steps from the first token on with one pass over all of them.

    At padding nothing is compared: where a row begins with it, attention that stays has no key to look at, and what it
    returns then is the framework's choice.
    """
    vocab = getattr(model.config, "vocab_size", 1)
    for graph in graphs:
        if graph.name != "step":
            check_graph(graph, calls[graph.name], vocab, at_padding=False)
            continue
        steps = 2 * max(mixer.max_step or 1 for mixer in _mixers_by_layer(model).values()) + MORE_STEPS
        steps = min(steps, *graph.limits.values()) if graph.limits else steps
        tokens = torch.randint(0, vocab, (ROWS, steps), generator=torch.Generator().manual_seed(1))
        wanted = model(input_ids=tokens, use_cache=False).logits
        state = initial_state(graph, ROWS, chunks=steps)
        for number, token in enumerate(tokens.unbind(1)):
            found = calls["step"]({"token": token, **state})
            compare(f"step {number + 1}: logits", found["logits"], wanted[:, number])
            state = {name: found[f"next.{name}"] for name in state}


def _end(model: Any) -> int:
    """The token that ends a text; 0 if the model does not know one."""
    found = getattr(model.config, "eos_token_id", None)
    return int(found[0] if isinstance(found, list) else found or 0)


def _card(model: Any, folder: Path, how: str) -> str:
    mechanisms = ", ".join(dict.fromkeys(mixer.name for mixer in _mixers(model)))
    count = sum(parameter.numel() for parameter in model.parameters())
    head = f"---\ntags: [subquad, {mechanisms}]\n---\n\n# {folder.resolve().name}\n\n"
    what = f"{type(model).__name__} of {count:,} parameters, with {mechanisms} in the place of attention."
    return f"{head}{what}\n\n## Use\n\n{how}\n"


def _mixers(model: nn.Module) -> list[Mixer]:
    return [module.mixer for module in model.modules() if isinstance(module, AttentionBetween | TransformersAttention)]
