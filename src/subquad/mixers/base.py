"""The contract of every mixing mechanism.

A mechanism is one file: a docstring with its equation, cost and citation, a config, and a `Mixer` subclass decorated
with `@register` (see registry.py). The base class checks inputs, refuses what a mechanism cannot do, turns any padding
into right padding, splits streams into steps and caches cross-attention contexts, so that a mechanism only writes its
mathematics:

    setup                       parameters and submodules                       every mechanism that has some
    mix(x, layout)              the parallel form                               every mechanism
    new_state, step             the streaming form                              causal mechanisms
    encode_context              what is kept of a context                       mechanisms with cross-attention
    attend_context              how it is read                                  the same

A causal mixer never looks ahead: with finite inputs, position t depends on positions up to t alone. A mechanism that
hides later tokens by weights of 0 (softmax, local, eva, performer) turns a NaN or an infinite number in one of them
into NaN at earlier positions of the row, for 0 x NaN is NaN; to set those values to 0 as well would cost a pass over
all of them for every query. Padded tokens are not read, whatever they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Options, Tunable
from subquad.kernels import dispatch
from subquad.kernels.precision import is_autocast
from subquad.mixers.layout import Layout, Padding, padding_tensor, zero_padding
from subquad.mixers.registry import refuse, who_can, why_not
from subquad.mixers.state import CrossState, State, fresh_lengths


class MixerConfig(Options):
    """Options that every mechanism has. A mechanism adds its own in a subclass beside its module."""

    dim: int = Field(ge=1, description="model width C; inputs and outputs are (batch, time, C)")
    heads: int = Field(8, ge=1, description="number of heads, each C / heads wide")
    causal: bool = Field(False, description="position t sees only positions up to t")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the output")

    def check(self) -> None:
        self.check_heads(self.dim)

    def check_heads(self, channels: int) -> None:
        if channels % self.heads:
            near = max(n for n in range(1, min(self.heads, channels) + 1) if channels % n == 0)
            raise ValueError(f"{self.heads} heads do not divide {channels} channels; {near} heads would")


ConfigT = TypeVar("ConfigT", bound=MixerConfig)


class MixerOutput(NamedTuple):
    """Result of a mixer: y (batch, time, channels); the state to pass next, when streaming; aux (batch,) or None."""

    y: Tensor
    state: State | None = None
    aux: Tensor | None = None


@dataclass(frozen=True)
class Capabilities:
    """One row of the mechanism table."""

    causal: bool
    cross: bool
    grid: bool
    """True: neighbourhoods are two-dimensional when a grid is given. False: a grid is read row by row."""
    state: str
    """What streaming keeps, and how it grows; "none" when the mechanism cannot stream."""
    linear: bool = True
    """Memory is linear in the length."""
    bidirectional: bool = True
    """False: the mechanism is causal only. It is then causal unless its options say otherwise, which is refused."""
    averages: bool = False
    """True: outputs are averages of the tokens' values, with weights that sum to 1: it does not matter how many tokens
    of one value there are. (EVA's do where the window divides the length.)"""

    def __post_init__(self) -> None:
        if not (self.causal or self.bidirectional):
            raise ValueError("a mechanism is causal or bidirectional, or both: it cannot be neither")
        if not self.bidirectional and (self.cross or self.grid):
            raise ValueError("a mechanism that is causal only reads sequences: it has neither cross=True nor grid=True")


class Mixer(nn.Module, Generic[ConfigT]):
    """Mixes tokens: (batch, time, channels) -> the same shape. See the module docstring for what a subclass writes.

    `class EVA(Mixer[EVAConfig])` says that the options of a mechanism are an EVAConfig: so is `self.config`, and
    `EVA.Config` is that class.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MixerConfig]] = MixerConfig
    capabilities: ClassVar[Capabilities]
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Small option sets (without dim and heads) that together exercise the mechanism; the test suite runs them all."""

    is_floor: ClassVar[bool] = False
    """Whether it is there for mechanisms to be compared with and is none of them: then `available` leaves it out."""

    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The options of the publication by data set, such as {"imagenet": {"window": 7}}; `subquad compare --mixers
    NAME:SET` takes them. A name with a dot is a setting of the recipe that belongs to them."""

    tuned: ClassVar[Mapping[str, Tunable]] = {}
    """The options that `subquad compare --tune` searches, with what it may try for each. A name with a dot is a setting
    of the recipe."""

    max_step: int | None = None
    """Longest chunk that `step` takes at once; the base class splits longer ones. None: any."""

    period: int = 1
    """A causal mixer treats a sequence that begins this many tokens later, or a multiple of it, in the same way: the
    window of a mechanism that counts windows from the first token."""

    state_type: ClassVar[type[State]] = State
    """What `new_state` returns: a state of another type is refused."""
    context_type: ClassVar[type[CrossState]] = CrossState
    """What `encode_context` returns, likewise."""

    config: ConfigT

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in cls.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                found = argument.__bound__ if isinstance(argument, TypeVar) else argument
                if isinstance(found, type) and issubclass(found, MixerConfig):
                    cls.Config = found

    def __init__(self, config: ConfigT | None = None, /, **options: Any) -> None:
        super().__init__()
        if config is not None:
            refuse(type(self), _form(config))
        self.config = config if config is not None else self.parse(options)  # type: ignore[assignment]
        self.setup()

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> MixerConfig:
        """The config that these options give; a mistake in them is a ValueError that names mechanism and option."""
        config = cls.Config.parse(cls.name, {"causal": not cls.capabilities.bidirectional, **options})
        refuse(cls, _form(config))
        return config

    # ------------------------------------------------------------------ what a mechanism writes

    def setup(self) -> None:
        """Creates the parameters and submodules that `self.config` asks for."""

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """y (batch, time, channels) and aux (batch,) or None. Values of y at positions that are not tokens are free."""
        raise NotImplementedError

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state before the first token."""
        raise NotImplementedError

    def step(self, x: Tensor, new: Tensor | None, state: Any) -> tuple[Tensor, State]:
        """Reads a chunk x (batch, time, channels), of which the first new[b] positions of row b are tokens.

        None: all positions of all rows are, as when decoding.
        """
        raise NotImplementedError

    def encode_context(self, context: Tensor, layout: Layout) -> CrossState:
        """What cross-attention needs of its context."""
        raise NotImplementedError

    def attend_context(self, x: Tensor, memory: Any) -> Tensor:
        """Cross-attention of x to a remembered context. Every position of x is treated alike, on its own."""
        raise NotImplementedError

    def freeze_constants(self) -> None:
        """Computes once what depends on parameters alone, for a model whose parameters will not change."""
        return

    def share_within_stack(self, first: Any) -> None:  # noqa: ARG002
        """Shares with the first layer of the same options in a stack what these say that layers share: nothing."""
        return

    @property
    def borrows_weights(self) -> bool:
        """Whether it computes with parameters of another layer."""
        return False

    def sees_grid(self, grid: tuple[int, int]) -> bool:  # noqa: ARG002
        """Whether a given grid is used as one; otherwise it is read as a sequence."""
        return self.capabilities.grid

    def keeps_linear_memory(self) -> bool:
        """Whether memory is linear in the length, with these options."""
        return self.capabilities.linear

    def averages_values(self) -> bool:
        """Whether outputs are averages of the tokens' values, with these options."""
        return self.capabilities.averages

    def reads_from(self, start: int) -> int:  # noqa: ARG002
        """The first position that causal outputs at `start` and after it depend on; 0 where there is no limit.

        A sequence that begins there, or before it at a multiple of `period`, has the same outputs from `start` on.
        """
        return 0

    def why_no_streaming(self) -> str | None:
        """The reason why this mixer, with its options, cannot stream; None when it can."""
        if self.capabilities.state == "none":
            return f"{self.name} has no streaming form"
        return (
            None if self.config.causal else f"this {self.name} was built with causal=False; streaming needs causal=True"
        )

    @property
    def can_stream(self) -> bool:
        """Whether it reads a sequence of its own piece by piece; `why_no_streaming` says why not."""
        return self.why_no_streaming() is None

    def why_no_cross(self) -> str | None:
        """The reason why this mixer, with its options, cannot read a context; None when it can."""
        if reason := why_not(type(self), "cross"):
            return reason
        if self.config.causal:
            return f"{self.name}: cross-attention reads the whole context; build the mixer with causal=False"
        return None

    @property
    def input_width(self) -> int:
        """Channels of x: the model width."""
        return self.config.dim

    # ------------------------------------------------------------------ what a user calls

    def init_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state to begin streaming with: self-attention over a causal stream, or cross-attention to a context
        that the first call brings. Device and dtype default to the parameters'; inside autocast the dtype defaults to
        autocast's, in which projections are computed."""
        if batch < 1:
            raise ValueError(f"{self.name}: a state needs a batch of at least 1 (got {batch})")
        like = next(self.parameters(), torch.empty(0))
        device = torch.device(device) if device is not None else like.device
        dispatch.check(self.name, device)
        reason = self.why_no_streaming()
        if reason is None:
            return self.new_state(batch, device, dtype or _autocast_dtype(like.dtype, device))
        if self.why_no_cross() is None:
            return State(fresh_lengths(batch, device))
        raise ValueError(f"{reason}. {who_can('state')}")

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        padding: Tensor | Padding | None = None,
        context_padding: Tensor | Padding | None = None,
        grid: tuple[int, int] | None = None,
        state: State | None = None,
    ) -> MixerOutput:
        """Mixes x (batch, time, channels), or reads `context` (batch, time', channels) with it.

        padding, context_padding: (batch, time) bool, True = ignore; outputs there are zeros. Layers that share one
        compute `Padding.of` it once, and pass that. grid: (H, W) with H * W = time. state: from `init_state` or the
        previous call.
        """
        if state is None:  # `init_state` asked for a stream, of which each token counts
            dispatch.check(self.name, x.device)
        self._check_tokens("x", x, padding)
        if grid is not None and grid[0] * grid[1] != x.shape[1]:
            raise ValueError(
                f"{self.name}: grid {tuple(grid)} has {grid[0] * grid[1]} cells, x has {x.shape[1]} tokens"
            )
        if context is not None or isinstance(state, CrossState):
            return self._read_context(x, context, padding_tensor(padding), context_padding, state)
        if context_padding is not None:
            raise ValueError(f"{self.name}: context_padding was given without a context")
        if state is None and grid is not None and self.sees_grid(grid):
            return self._mix_grid(x, padding_tensor(padding), grid)
        rows = Padding.of(padding) if padding is not None else None
        if state is not None:
            return self._read_stream(x, rows, state)
        if rows is None:
            y, aux = self.mix(x, Layout())
            return MixerOutput(y, None, aux)
        y, aux = self.mix(rows.pack(x), rows.layout)
        return MixerOutput(rows.unpack(y), None, aux)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.config.model_dump(exclude_defaults=True).items())

    # ------------------------------------------------------------------ how the calls above are served

    def _mix_grid(self, x: Tensor, padding: Tensor | None, grid: tuple[int, int]) -> MixerOutput:
        if self.config.causal:
            raise ValueError(f"{self.name}: a causal mixer reads sequences; leave out the grid")
        if padding is None:
            y, aux = self.mix(x, Layout(grid=grid))
            return MixerOutput(y, None, aux)
        mask = padding.logical_not() | padding.all(1, keepdim=True)
        y, aux = self.mix(zero_padding(x, padding), Layout(mask, mask.logical_not(), grid=grid))
        return MixerOutput(zero_padding(y, padding), None, aux)

    def _read_stream(self, x: Tensor, padding: Padding | None, state: State) -> MixerOutput:
        reason = self.why_no_streaming()
        if reason is not None:
            raise ValueError(f"{reason}. {who_can('state')}")
        self._check_state(x, state, self.state_type)
        done, outputs = 0, []
        given = padding.pack(x) if padding is not None else x
        short = self.max_step is None or x.shape[1] <= self.max_step  # a single token is, and splitting takes time
        for part in (given,) if short else given.split(self.max_step, dim=1):
            new = (padding.lengths - done).clamp(0, part.shape[1]) if padding is not None else None
            y, state = self.step(part, new, state)
            outputs.append(y)
            done += part.shape[1]
        y = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        return MixerOutput(padding.unpack(y) if padding is not None else y, state, None)

    def _read_context(
        self,
        x: Tensor,
        context: Tensor | None,
        padding: Tensor | None,
        context_padding: Tensor | Padding | None,
        state: State | None,
    ) -> MixerOutput:
        reason = self.why_no_cross()
        if reason is not None:
            raise ValueError(f"{reason}. {who_can('cross')}")
        if isinstance(state, CrossState):
            self._check_state(x, state, self.context_type)
            memory = state
        else:
            assert context is not None
            self._check_tokens("context", context, context_padding)
            if context.shape[0] != x.shape[0]:
                raise ValueError(f"{self.name}: x has {x.shape[0]} rows, its context {context.shape[0]}")
            if context_padding is None:
                memory = self.encode_context(context, Layout())
            else:
                rows = Padding.of(context_padding)
                memory = self.encode_context(rows.pack(context), rows.layout)
        y = zero_padding(self.attend_context(zero_padding(x, padding), memory), padding)
        return MixerOutput(y, memory if state is not None else None, None)

    def _check_tokens(self, what: str, x: Tensor, padding: Tensor | Padding | None) -> None:
        dim, shape = self.input_width, x.shape
        if len(shape) != 3 or shape[2] != dim:
            raise ValueError(f"{self.name}: {what} must be (batch, time, {dim}), got {tuple(shape)}")
        if shape[1] == 0:
            raise ValueError(f"{self.name}: {what} is an empty sequence; give at least one position")
        dtype = self._weight_dtype()
        if x.dtype != dtype and dtype is not None and not is_autocast(x.device):
            raise ValueError(
                f"{self.name}: {what} is {x.dtype}, the parameters are {dtype}; convert {what} or the mixer, or use "
                "torch.autocast"
            )
        if padding is None:
            return
        padding = padding.padding if isinstance(padding, Padding) else padding
        if padding.dtype != torch.bool:
            raise ValueError(f"{self.name}: padding of {what} must be bool (True = ignore), got {padding.dtype}")
        if padding.shape != x.shape[:2]:
            raise ValueError(f"{self.name}: padding of {what} must be {tuple(x.shape[:2])}, got {tuple(padding.shape)}")

    def _weight_dtype(self) -> torch.dtype | None:
        """The precision of the parameters, None if there are none. Each call asks, and `parameters()` takes longer."""
        for module in (self, *self._modules.values()):
            for parameter in module._parameters.values() if module is not None else ():
                if parameter is not None:
                    return parameter.dtype if parameter.is_floating_point() else None
        return None

    def _check_state(self, x: Tensor, state: State, expected: type[State]) -> None:
        if type(state) is not expected and expected not in (State, CrossState):
            raise ValueError(
                f"{self.name}: the state is a {type(state).__name__}, which belongs to another mechanism; begin with "
                f"`init_state` of this mixer, which needs a {expected.__name__}"
            )
        if state.lengths.shape[0] != x.shape[0]:
            raise ValueError(f"{self.name}: the state holds {state.lengths.shape[0]} rows, x has {x.shape[0]}")


def _form(config: MixerConfig) -> Literal["bidirectional", "causal"]:
    return "causal" if config.causal else "bidirectional"


# ---------------------------------------------------------------------- precision


def _autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of products of tensors of `dtype`: autocast's where it is on, which leaves float64 alone."""
    if dtype == torch.float64 or not is_autocast(device):
        return dtype
    return torch.get_autocast_dtype(device.type)
