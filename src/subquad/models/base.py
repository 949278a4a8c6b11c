"""What all models share: configs, the registry of their kinds, input lengths, and the initialisation of weights."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from pydantic import model_validator
from torch import Tensor, nn

from subquad.config import Options, nearest
from subquad.mixers import Mixer
from subquad.mixers.attention import init_small, init_xavier
from subquad.mixers.softmax import Softmax
from subquad.nn.block import Block
from subquad.nn.stack import MixerChoice, Stack, StackConfig, StackState


class ModelOutput(NamedTuple):
    """logits: (batch, time, vocab) or (batch, num_classes). state: for the next call, if one was given. aux: the mean
    regulariser (batch,) of the layers that have one, or None."""

    logits: Tensor
    state: StackState | None = None
    aux: Tensor | None = None


class ModelConfig(Options):
    """Base class of all model configs. `kind` names the class of the model."""

    kind: str
    stacks: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The fields that hold a stack, with the options of it that the model fixes."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Default options of stacks, where they differ from those of other models."""
    stack_embeddings: ClassVar[Mapping[str, str]] = {}
    """The field of the embedding before each stack that has one."""
    ignored_data_options: ClassVar[frozenset[str]] = frozenset()
    """Options that follow from the data for other kinds of model, and that this kind does not have."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Gives stacks the options that follow from the model, such as its width; a stack must not contradict them."""
        if not isinstance(given, Mapping):
            return given
        given = dict(given)
        for name, required in cls.stacks.items():
            stack = given.get(name, {})
            stack = stack.model_dump(exclude_unset=True) if isinstance(stack, StackConfig) else stack
            if not isinstance(stack, Mapping):
                continue  # pydantic reports what is wrong with it
            fixed = {**required, **cls.options_of_all_stacks(given)}
            for option, value in fixed.items():
                if stack.get(option, value) != value:
                    raise ValueError(f"{name}.{option} is {stack[option]!r}; this kind of model needs {value!r}")
            given[name] = {**cls.defaults.get(name, {}), **stack, **fixed}
            embedding = given.get(cls.stack_embeddings.get(name, ""), {})
            positions = (
                embedding.get("positions") if isinstance(embedding, Mapping) else getattr(embedding, "positions", None)
            )
            if positions == "rotary":
                given[name]["mixer"] = _with_rotary(stack.get("mixer", "softmax"))
        return given

    @classmethod
    def options_of_all_stacks(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that every stack takes from the model."""
        return {"dim": given.get("dim", cls.model_fields["dim"].default)}


def _with_rotary(mixer: Any) -> Any:
    """Returns a mixer choice with rotary positions, which are an option of the mixers."""
    mixer = mixer.model_dump() if isinstance(mixer, MixerChoice) else mixer
    if isinstance(mixer, str):
        return {"name": mixer, "rotary": True}
    return {**mixer, "rotary": True} if isinstance(mixer, Mapping) else mixer  # pydantic reports what is wrong with it


class Model(nn.Module):
    """Base class of all models. A model consists of its config and its weights only."""

    Config: ClassVar[type[ModelConfig]]
    config: Any

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        return cls(cls.Config.parse(f"model {cls.Config.model_fields['kind'].default}", options))

    def parts(self) -> dict[str, nn.Module]:
        """Returns the parts whose parameters `subquad info` counts, by name."""
        return dict(self.named_children())

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    has_one_stack: ClassVar[bool] = True
    """Whether a single stack mixes the input, so that its cost can be measured alone."""

    @property
    def input_stack(self) -> Stack:
        """The stack that mixes the input, or the first of several."""
        raise NotImplementedError

    # ------------------------------------------------------------------ inputs of any length

    @classmethod
    def possible_length(cls, length: int) -> int:
        """Returns the largest number of tokens up to `length` that an input can have."""
        return length

    @classmethod
    def config_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:  # noqa: ARG003
        """Returns options for inputs of a `possible_length`. They leave tables of text positions as they are."""
        return dict(options)

    @property
    def native_length(self) -> int | None:
        """The number of tokens of the inputs that the config is made for, or None if it is for any length."""
        return None

    def grid(self, length: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Returns the grid of an input of a `possible_length` in the input stack, or None if it is a sequence."""
        return None

    def stack_length(self, length: int) -> int:
        """Returns the number of tokens that the input stack mixes for an input of `length` tokens."""
        return length

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Returns arguments of the forward pass: `batch` random inputs of a `possible_length`.

        They are on the generator's device, or on torch's default device if there is no generator.
        """
        raise NotImplementedError


def random_tokens(vocab: int, batch: int, length: int, generator: torch.Generator | None) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=generator, device=generator.device if generator else None)


# ---------------------------------------------------------------------- registry

MODELS: dict[str, type[Model]] = {}
ModelType = TypeVar("ModelType", bound=type[Model])


def register_model(model: ModelType) -> ModelType:
    """Registers a model class under the kind of its config; a class decorator."""
    MODELS[model.Config.model_fields["kind"].default] = model
    return model


def build_from_config(options: Mapping[str, Any]) -> Model:
    """Builds the model of a complete config; `options["kind"]` names its class."""
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in MODELS:
        near = nearest(str(kind), MODELS) if kind is not None else ""
        raise ValueError(f"a model's kind must be one of {', '.join(MODELS)}; got {kind!r}{near}")
    return MODELS[kind].from_options(options)


def compile_blocks(model: nn.Module) -> None:
    """Compiles every block in place, so that equal blocks share one graph instead of all forming a large one."""
    for block in model.modules():
        if isinstance(block, Block):
            block.compile()


# ---------------------------------------------------------------------- initial weights


def modules_outside_mixers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that do not belong to a mixer. Mixers initialise themselves as their originals do."""
    yield module
    for child in module.children():
        if not isinstance(child, Mixer):
            yield from modules_outside_mixers(child)


def init_as_vision(model: nn.Module) -> None:
    """Initialises linear maps with a truncated normal of deviation 0.02, and their biases with 0."""
    for module in modules_outside_mixers(model):
        init_small(module)


def init_as_fairseq(model: nn.Module) -> None:
    """Initialises softmax attention: Xavier-uniform q, k, v with gain 1/sqrt(2), and the output map with gain 1."""
    for mixer in model.modules():
        if isinstance(mixer, Softmax):
            for part in mixer.qkv.weight.split(mixer.inner):
                nn.init.xavier_uniform_(part, gain=2**-0.5)
            if isinstance(mixer.out, nn.Linear):
                init_xavier(mixer.out)


def mean_aux(*parts: Tensor | None) -> Tensor | None:
    """Returns the mean (batch,) of the regularisers (layers, batch) over all layers, or None without any."""
    present = [part for part in parts if part is not None]
    return torch.cat(present).mean(0) if present else None
