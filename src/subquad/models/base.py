"""What all models share: a config that rebuilds them, a registry of kinds, counts, and how weights begin."""

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
    """logits: (batch, time, vocab) or (batch, classes); state: for the next call, when streaming; aux: the mixers'
    regulariser (batch,), the mean over the layers that have one, or None."""

    logits: Tensor
    state: StackState | None = None
    aux: Tensor | None = None


class ModelConfig(Options):
    """Base of all model configs. `kind` names the class of model; `stacks` its parts that take the model's width."""

    kind: str
    stacks: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names of the fields that hold a stack, with what the model decides about each."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What a stack has unless it says otherwise, where this differs from other models."""
    stack_embeddings: ClassVar[Mapping[str, str]] = {}
    """Name of the embedding before a stack, where there is one."""
    ignored_data_options: ClassVar[frozenset[str]] = frozenset()
    """What data decides about other kinds of model, and this kind has no option for."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Stacks take the model's width and what else it decides; what they say themselves must agree."""
        if not isinstance(given, Mapping):
            return given
        given = dict(given)
        for name, decided in cls.stacks.items():
            stack = given.get(name, {})
            stack = stack.model_dump(exclude_unset=True) if isinstance(stack, StackConfig) else stack
            if not isinstance(stack, Mapping):
                continue  # pydantic says what is wrong with it
            fixed = {**decided, **cls.options_of_all_stacks(given)}
            for option, value in fixed.items():
                if stack.get(option, value) != value:
                    raise ValueError(f"{name}.{option} is {stack[option]!r}; this kind of model needs {value!r}")
            given[name] = {**cls.defaults.get(name, {}), **stack, **fixed}
            entrance = given.get(cls.stack_embeddings.get(name, ""), {})
            positions = (
                entrance.get("positions") if isinstance(entrance, Mapping) else getattr(entrance, "positions", None)
            )
            if positions == "rotary":
                given[name]["mixer"] = _with_rotary(stack.get("mixer", "softmax"))
        return given

    @classmethod
    def options_of_all_stacks(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What every stack takes from the model's own options."""
        return {"dim": given.get("dim", cls.model_fields["dim"].default)}


def _with_rotary(mixer: Any) -> Any:
    """A mixer choice with rotary positions, which are an option of the mixers."""
    mixer = mixer.model_dump() if isinstance(mixer, MixerChoice) else mixer
    if isinstance(mixer, str):
        return {"name": mixer, "rotary": True}
    return {**mixer, "rotary": True} if isinstance(mixer, Mapping) else mixer  # pydantic says what is wrong with it


class Model(nn.Module):
    """Base of all models. A model is its config and its weights, nothing else."""

    Config: ClassVar[type[ModelConfig]]
    config: Any

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        return cls(cls.Config.parse(f"model {cls.Config.model_fields['kind'].default}", options))

    def parts(self) -> dict[str, nn.Module]:
        """The parts whose parameters `subquad info` counts, by name."""
        return dict(self.named_children())

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    has_one_stack: ClassVar[bool] = True
    """Whether one stack mixes the input, so that its cost can be measured alone."""

    @property
    def input_stack(self) -> Stack:
        """The stack that mixes the input; of several, the first."""
        raise NotImplementedError

    # ------------------------------------------------------------------ inputs of any length

    @classmethod
    def possible_length(cls, length: int) -> int:
        """The number of tokens nearest below `length` that an input can have."""
        return length

    @classmethod
    def config_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:  # noqa: ARG003
        """Options of the model for inputs of a `possible_length`; tables of positions are another matter."""
        return dict(options)

    @property
    def native_length(self) -> int | None:
        """Tokens of the inputs that the config is for; None: inputs may have any length."""
        return None

    def grid(self, length: int) -> tuple[int, int] | None:  # noqa: ARG002
        """The grid of an input of a `possible_length` in the input stack; None: it is a sequence."""
        return None

    def stack_length(self, length: int) -> int:
        """Tokens that the input stack mixes, of an input of `length` tokens."""
        return length

    def random_inputs(self, batch: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Arguments of the forward pass: `batch` random inputs of a `possible_length`, on the generator's device.

        Without a generator they are on torch's default device.
        """
        raise NotImplementedError


def random_tokens(vocab: int, batch: int, length: int, generator: torch.Generator | None) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=generator, device=generator.device if generator else None)


# ---------------------------------------------------------------------- registry

MODELS: dict[str, type[Model]] = {}
ModelType = TypeVar("ModelType", bound=type[Model])


def register_model(model: ModelType) -> ModelType:
    """Class decorator: makes a model known under the kind of its config."""
    MODELS[model.Config.model_fields["kind"].default] = model
    return model


def build_from_config(options: Mapping[str, Any]) -> Model:
    """The model of a resolved config: `options["kind"]` says which."""
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in MODELS:
        near = nearest(str(kind), MODELS) if kind is not None else ""
        raise ValueError(f"a model's kind must be one of {', '.join(MODELS)}; got {kind!r}{near}")
    return MODELS[kind].from_options(options)


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of every block, in place: one graph for all blocks of a kind, instead of one large one."""
    for block in model.modules():
        if isinstance(block, Block):
            block.compile()


# ---------------------------------------------------------------------- how weights begin


def modules_outside_mixers(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that do not belong to a mixer: mixers begin as their originals do."""
    yield module
    for child in module.children():
        if not isinstance(child, Mixer):
            yield from modules_outside_mixers(child)


def init_as_vision(model: nn.Module) -> None:
    """Linear maps: truncated normal of deviation 0.02, biases 0."""
    for module in modules_outside_mixers(model):
        init_small(module)


def init_as_fairseq(model: nn.Module) -> None:
    """Softmax attention: q, k, v Xavier-uniform with gain 1/sqrt(2), the output map with gain 1."""
    for mixer in model.modules():
        if isinstance(mixer, Softmax):
            for part in mixer.qkv.weight.split(mixer.inner):
                nn.init.xavier_uniform_(part, gain=2**-0.5)
            if isinstance(mixer.out, nn.Linear):
                init_xavier(mixer.out)


def mean_aux(*parts: Tensor | None) -> Tensor | None:
    """The mean of regularisers (layers, batch) over all layers that have one: (batch,)."""
    present = [part for part in parts if part is not None]
    return torch.cat(present).mean(0) if present else None
