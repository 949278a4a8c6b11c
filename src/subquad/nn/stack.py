"""A stack of blocks, whose mechanisms are given by a pattern.

A pattern lists the mechanisms from the first layer to the last, optionally with counts:

    "eva"                  eva in every layer
    "softmax*5,primal"     five layers of softmax attention, then one of primal attention

Each option beside the pattern goes to every mechanism that has an option of this name; if none has, it is refused. A
list has one value for each layer, or one for all of them: {"name": "lightconv", "kernel_size": [3, 7, 15, 31]}.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad.config import Options, unknown_mixer_option
from subquad.mixers import Mixer, State, build, mixer_class
from subquad.mixers.layout import Padding
from subquad.mixers.registry import refuse
from subquad.mixers.state import fresh_lengths
from subquad.nn.block import Block, BlockInputs, BlockState
from subquad.nn.feedforward import Activation, FeedForward

PART = re.compile(r"\s*([\w-]+)\s*(?:\*\s*(\d+))?\s*")


class MixerChoice(BaseModel):
    """A pattern of mechanisms and their options. A plain string is a pattern without options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(description='The mechanism, or a pattern such as "softmax*5,primal".')

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @classmethod
    def of(cls, mixers: Sequence[Mixer]) -> Self:
        """Returns the choice that builds these mixers, one for each layer: the inverse of `by_layer`."""
        names = [mixer.name for mixer in mixers]
        changed = [mixer.config.model_dump(exclude_defaults=True, exclude={"dim", "causal"}) for mixer in mixers]
        options: dict[str, Any] = {}
        for option in dict.fromkeys(["heads", *(key for changes in changed for key in changes)]):
            values = [getattr(mixer.config, option, None) for mixer in mixers]
            options[option] = values[0] if all(value == values[0] for value in values) else values
        return cls.model_validate({"name": names[0] if len(set(names)) == 1 else ",".join(names), **options})

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def mechanisms(self) -> list[str]:
        """The mechanisms that the pattern names, each once."""
        return list(dict.fromkeys(part.partition("*")[0].strip() for part in self.name.split(",")))

    def names(self, layers: int) -> list[str]:
        """Returns the mechanism of each layer."""
        names: list[str] = []
        for part in self.name.split(","):
            found = PART.fullmatch(part)
            if found is None:
                raise ValueError(f"mixer pattern {self.name!r}: {part!r} is neither a mechanism nor mechanism*count")
            mixer_class(found[1])  # an unknown name is refused here
            names += [found[1]] * int(found[2] or 1)
        if len(names) == 1:
            return names * layers
        if len(names) != layers:
            raise ValueError(f"mixer pattern {self.name!r} has {len(names)} layers; the stack has {layers}")
        return names

    def by_layer(self, layers: int) -> list[tuple[str, dict[str, Any]]]:
        """Returns the mechanism of each layer and its options."""
        names = self.names(layers)
        known = {option for name in names for option in mixer_class(name).Config.model_fields}
        for option, value in self.options.items():
            if option not in known:
                raise ValueError(unknown_mixer_option(self.name, option, known))
            if isinstance(value, list | tuple) and len(value) not in (1, layers):
                raise ValueError(f"mixer option {option} has {len(value)} values; the stack has {layers} layers")
        return [(name, self._layer_options(name, layer)) for layer, name in enumerate(names)]

    def _layer_options(self, name: str, layer: int) -> dict[str, Any]:
        own = {}
        for option, value in self.options.items():
            if option in mixer_class(name).Config.model_fields:
                listed = isinstance(value, list | tuple)
                own[option] = value[layer if len(value) > 1 else 0] if listed else value
        return own


def mixer_names(config: Any) -> set[str]:
    """Returns the mechanisms that a model's config names anywhere, as mixers or for cross-attention."""
    if isinstance(config, list | tuple):
        return {name for part in config for name in mixer_names(part)}
    if not isinstance(config, Mapping):
        return set()
    found = {name for key, part in config.items() if key not in ("mixer", "cross") for name in mixer_names(part)}
    for choice in (config[key] for key in ("mixer", "cross") if config.get(key) is not None):
        found |= set(MixerChoice.model_validate(choice).mechanisms)
    return found


class StackConfig(Options):
    """Options of a stack of blocks."""

    layers: int = Field(6, ge=0, description="The number of blocks.")
    dim: int = Field(512, ge=1, description="The width of the model.")
    heads: int = Field(8, ge=1, description="The heads of mixers and cross-attention, unless their own options differ.")
    ffn_dim: int = Field(2048, ge=1, description="The width of the hidden layer of the feed-forward networks.")
    mixer: MixerChoice = Field(MixerChoice(name="softmax"), description="The mixer of each layer, with its options.")
    cross: MixerChoice | None = Field(None, description="The mechanism of cross-attention; null: there is none.")
    causal: bool = Field(False, description="Whether a position depends only on itself and earlier ones.")
    activation: Activation = Field("relu", description="The activation of the feed-forward networks.")
    ffn_bias: bool = Field(True, description="Whether the feed-forward networks have biases.")
    ffn_conv: bool = Field(
        False, description="Whether feed-forward networks have a 3 x 3 depthwise convolution (grids only)."
    )
    norm: Literal["pre", "post"] = Field("post", description="Layer norm before each part, or after its residual sum.")
    final_norm: bool | None = Field(
        None, description="Whether a layer norm follows the last block; by default if norm is pre."
    )
    norm_eps: float = Field(1e-5, gt=0, description="The epsilon of the layer norms.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="The dropout rate of what each part adds to the residual.")
    input_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="The dropout rate of the inputs of mixers.")
    activation_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="The dropout rate after the activation.")
    layer_drop: float = Field(0.0, ge=0.0, lt=1.0, description="The probability that training skips a block.")
    drop_path: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="The probability that a sample skips a part of the last block. It rises from 0 at the first block.",
    )

    @property
    def ends_with_norm(self) -> bool:
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    def check(self) -> None:
        for name, options in self.mixer.by_layer(self.layers):
            if self.causal and options.get("causal") is False:
                raise ValueError(f"{name}: causal=False would show later tokens to a causal stack; leave it out")
            mixer_class(name).parse(self.complete(options, self.causal))
        for name, options in self.cross.by_layer(self.layers) if self.cross is not None else ():
            refuse(mixer_class(name), "cross")
            mixer_class(name).parse(self.complete(options, False))

    def complete(self, options: dict[str, Any], causal: bool) -> dict[str, Any]:
        """Returns the options of a mixer with those that follow from the stack."""
        return {"dim": self.dim, "heads": self.heads, "causal": causal, **options}


@dataclass
class StackState:
    """lengths: (batch,) int64, the tokens that each row has read; layers: the state of each block."""

    lengths: Tensor
    layers: list[BlockState]

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> Self:
        """Returns the state of the rows `index` (new_batch,). Beam search keeps, drops and repeats hypotheses with it.

        contexts: indices of the contexts to keep for cross-attention, if rows share them: the first
        new_batch / len(contexts) rows attend to the first one, and so on. If it is None, each row keeps its own
        context, or all contexts are kept where rows share them already.
        """
        layers = [layer.reorder(index, contexts) for layer in self.layers]
        return type(self)(self.lengths.index_select(0, index), layers)

    def reserve(self, tokens: int) -> Self:
        """Returns the state with room for so many tokens; see `State.reserve`."""
        return type(self)(self.lengths, [layer.reserve(tokens) for layer in self.layers])

    def with_fixed_size(self) -> Self:
        """Returns the state with shapes that stay; see `State.with_fixed_size`."""
        return type(self)(self.lengths, [layer.with_fixed_size() for layer in self.layers])

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the state, for counting its memory."""
        states: list[State] = [part for layer in self.layers for part in (layer.mixer, layer.cross) if part is not None]
        return [value for state in states for value in vars(state).values() if isinstance(value, Tensor)]


class StackOutput(NamedTuple):
    """x: (batch, time, dim). state: for the next call, if one was given. aux: the regularisers (layers, batch) of those
    layers that have one, or None."""

    x: Tensor
    state: StackState | None
    aux: Tensor | None


class Stack(nn.Module):
    """Applies all blocks to x (batch, time, dim). The shape stays the same."""

    def __init__(self, config: StackConfig, drop_paths: list[float] | None = None) -> None:
        """drop_paths: one rate for each block, if the stack is a part of a longer one."""
        super().__init__()
        self.config = config
        rates = drop_paths if drop_paths is not None else drop_path_rates(config.drop_path, config.layers)
        mixers = config.mixer.by_layer(config.layers)
        crosses = config.cross.by_layer(config.layers) if config.cross is not None else [None] * config.layers
        self.blocks = nn.ModuleList(
            self._block(mixer, cross, rate) for mixer, cross, rate in zip(mixers, crosses, rates, strict=True)
        )
        self._share_between_layers()
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if config.ends_with_norm else None
        self.recompute = False  # set by training: activations of blocks are computed again in the backward pass

    def _block(self, mixer: tuple[str, dict[str, Any]], cross: tuple[str, dict[str, Any]] | None, rate: float) -> Block:
        config = self.config
        ffn = FeedForward(
            config.dim, config.ffn_dim, config.activation, config.ffn_bias, config.activation_dropout, config.ffn_conv
        )
        return Block(
            self._mixer(mixer, config.causal),
            self._mixer(cross, False) if cross is not None else None,
            ffn,
            pre_norm=config.norm == "pre",
            norm_eps=config.norm_eps,
            dropout=config.dropout,
            input_dropout=config.input_dropout,
            drop_path=rate,
        )

    def _share_between_layers(self) -> None:
        for place in ("mixer", "cross"):
            mixers = [mixer for block in self.blocks if (mixer := getattr(block, place)) is not None]
            for mixer in mixers:
                first = next(other for other in mixers if other.config == mixer.config)
                if first is not mixer:
                    mixer.share_within_stack(first)

    def _mixer(self, choice: tuple[str, dict[str, Any]], causal: bool) -> Mixer:
        name, options = choice
        return build(name, **self.config.complete(options, causal))

    def init_state(
        self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> StackState:
        """Returns the state before the first token."""
        layers = [cast(Block, block).init_state(batch, device, dtype) for block in self.blocks]
        if device is None:
            device = next(self.parameters(), torch.empty(0)).device
        return StackState(fresh_lengths(batch, device), layers)

    def reads_from(self, start: int) -> int:
        """The first position of a causal stack's input that has to be read for its outputs from `start` on.

        Without what comes before it, these outputs are the same.
        """
        mixers = [cast(Block, block).mixer for block in self.blocks]
        for mixer in reversed(mixers):
            start = mixer.reads_from(start)
        return start - start % math.lcm(*(mixer.period for mixer in mixers))

    def forward(self, x: Tensor, inputs: BlockInputs, state: StackState | None = None) -> StackOutput:
        # Tokens of padded rows move to the front once, for all blocks: except for mixers, blocks treat every position
        # on its own. On a grid the neighbours of a cell matter, so every token stays in its cell.
        rows = Padding.of(inputs.padding) if inputs.padding is not None and inputs.grid is None else None
        if rows is not None:
            x, inputs = rows.to_front(x), inputs._replace(padding=rows.of_front())
        if inputs.context is not None and inputs.context_padding is not None:
            source = Padding.of(inputs.context_padding)
            inputs = inputs._replace(context=source.to_front(inputs.context), context_padding=source.of_front())
        layers: list[BlockState] = []
        regularisers: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if self.training and self.config.layer_drop and torch.rand((), device="cpu") < self.config.layer_drop:
                continue
            run = partial(checkpoint, block, use_reentrant=False) if self.recompute and self.training else block
            x, memory, aux = run(x, inputs, state.layers[number] if state is not None else None)
            if memory is not None:
                layers.append(memory)
            if aux is not None:
                regularisers.append(aux)
        if self.norm is not None:
            x = self.norm(x)
        if rows is not None:
            x = rows.from_front(x)
        after = None
        if state is not None:
            read = x.shape[1] if inputs.padding is None else Padding.of(inputs.padding).lengths
            after = StackState(state.lengths + read, layers)
        return StackOutput(x, after, torch.stack(regularisers) if regularisers else None)


def drop_path_rates(rate: float, count: int) -> list[float]:
    """Returns drop-path rates that rise linearly from 0 for the first block to `rate` for the last."""
    return [rate * number / max(1, count - 1) for number in range(count)]
