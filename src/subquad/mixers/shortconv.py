"""What lightconv and dynamicconv share: the block around a convolution whose taps heads share, and its streaming form.

    u = GLU(in_proj(x)), pads zeroed  ->  c_t = sum_k taps_k u_{t-P+k}  ->  out_proj(c)
    P = K - 1 when causal, (K - 1) // 2 when centred (an even kernel looks one position further ahead than back)

Inputs outside the sequence are zeros, and the taps that meet them are lost: nothing is renormalised, unless a mechanism
says so.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Choices
from subquad.kernels import tracing
from subquad.kernels.conv import normalised_taps, tap_conv, tap_conv_extended
from subquad.kernels.dropout import dropout
from subquad.kernels.gathered import gathered_conv, may_gather
from subquad.mixers.attention import init_xavier
from subquad.mixers.base import Mixer, MixerConfig
from subquad.mixers.layout import Layout, zero_padding
from subquad.mixers.state import LEAST_ROOM, State, advanced, fresh_lengths, keep_last


class ShortConvConfig(MixerConfig):
    """Options of both convolutions."""

    kernel_size: int = Field(31, ge=1, description="taps K, odd or even; may exceed the length")
    glu: bool = Field(True, description="the input map is gated: value times sigmoid(gate)")
    tap_softmax: bool = Field(True, description="taps are normalised by a softmax over all K")
    tap_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the taps, per position, after the softmax")
    conv_bias: bool = Field(False, description="bias added to the convolution's output")
    conv_dim: int | None = Field(None, ge=1, description="channels of the convolution; default C")
    projected: bool = Field(True, description="linear maps before and after the convolution")

    @property
    def width(self) -> int:
        return self.conv_dim or self.dim

    @property
    def before(self) -> int:
        """How many taps lie before the current position: P."""
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2

    def check(self) -> None:
        self.check_heads(self.width)
        if not self.projected and self.glu:
            raise ValueError("projected=False leaves out the map that glu gates; set glu=False")
        if not self.projected and self.conv_dim is not None:
            raise ValueError("projected=False leaves out the maps to and from conv_dim; leave conv_dim out as well")


@dataclass
class ShortConvState(State):
    """inputs: (rows, places, conv_dim), of which the last `count` = K - 1 before the room are the last inputs of the
    convolution; zeros before a row's first token.

    order: (batch, K - 1) int64, the row of `inputs` that holds each of a row's last inputs, or (batch, 1) if one row
    holds all of them; None: its own. room: places at the end into which steps write; None: they copy, and nothing but
    the last inputs is there.
    """

    inputs: Tensor
    count: int
    order: Tensor | None = None
    room: int | None = None

    def reorder(self, index: Tensor) -> Self:
        order = index[:, None] if self.order is None else self.order.index_select(0, index)
        return replace(self, lengths=self.lengths.index_select(0, index), order=order)

    def reserve(self, tokens: int) -> Self:
        """The state with room, on a CPU: there moving an order takes less time than moving inputs does."""
        is_enough = self.room is not None and self.room >= tokens and self.inputs.shape[0] >= self.lengths.shape[0]
        if is_enough or self.inputs.device.type != "cpu":
            return self
        room = max(tokens, LEAST_ROOM)
        return replace(self, inputs=F.pad(self.last_inputs(), (0, 0, 0, room)), order=None, room=room)

    def with_fixed_size(self) -> Self:
        """The state with its rows moved: what a step reads has then the shapes of what it returns."""
        return type(self)(self.lengths, self.last_inputs(), self.count)

    @property
    def first(self) -> int:
        """The place of the first of the last inputs."""
        return self.inputs.shape[1] - (self.room or 0) - self.count

    def last_inputs(self) -> Tensor:
        """(batch, K - 1, conv_dim)."""
        if self.order is None or self.order.shape[1] == 1:
            last = self.inputs[:, self.first : self.first + self.count]
            return last if self.order is None else last.index_select(0, self.order[:, 0])
        return self.inputs[self.order, torch.arange(self.first, self.first + self.count, device=self.inputs.device)]

    def followed_by(self, u: Tensor) -> Tensor:
        """The last inputs of every row and then its new ones: (batch, K - 1 + time, conv_dim)."""
        is_moved = self.order is not None and self.order.shape[1] == 1 and self.room is None
        if not is_moved or torch.is_grad_enabled() or tracing.is_tracing() or self.inputs.dtype != u.dtype:
            return torch.cat([self.last_inputs().to(u.dtype), u], 1)
        assert self.order is not None
        extended = u.new_empty(u.shape[0], self.count + u.shape[1], u.shape[2])
        torch.index_select(self.inputs, 0, self.order[:, 0], out=extended[:, : self.count])
        extended[:, self.count :] = u
        return extended

    def append(self, u: Tensor) -> tuple[Self, Tensor]:
        """Writes the next input u (batch, conv_dim) into the room, and returns the state after it.

        Also the order (batch, K or 1) in which the last K inputs lie, from the place `first` of this state on.
        """
        assert self.room, "reserve makes room"
        rows = torch.arange(u.shape[0], device=u.device)[:, None]
        self.inputs[: u.shape[0], self.first + self.count] = u
        after = replace(self, lengths=self.lengths + 1, room=self.room - 1)
        if self.order is None:
            return after, rows
        order = torch.cat([self.order.expand(-1, self.count), rows], 1)
        return replace(after, order=order[:, 1:]), order


ShortConvConfigT = TypeVar("ShortConvConfigT", bound=ShortConvConfig)


class ShortConvMixer(Mixer[ShortConvConfigT]):
    """The block; a mechanism says where the taps come from."""

    state_type = ShortConvState
    tuned: ClassVar = {"kernel_size": Choices((7, 15, 31, 63))}

    def setup(self) -> None:
        config = self.config
        self.in_proj: nn.Linear | None = None
        self.out_proj: nn.Linear | None = None
        if config.projected:
            self.in_proj = nn.Linear(config.dim, 2 * config.width if config.glu else config.width)
            self.out_proj = nn.Linear(config.width, config.dim)
            init_xavier(self.in_proj)
            init_xavier(self.out_proj)
        self.conv_bias = nn.Parameter(torch.zeros(config.width)) if config.conv_bias else None

    def taps(self, query: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Taps (heads, K), or (batch, time, heads, K) for the positions of query (batch, time, width).

        start, end: (batch,) int64; the first position of query is the row's token number `start`, and the row ends
        before token number `end`.
        """
        raise NotImplementedError

    def taps_or_logits(self, query: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, bool]:
        """The taps and False, or logits and True: the convolution then takes their softmax itself."""
        return self.taps(query, start, end), False

    # ------------------------------------------------------------------ the convolution alone

    def convolve(self, u: Tensor, layout: Layout, query: Tensor | None = None) -> Tensor:
        """u: (batch, time, conv_dim) -> the same shape. query: what taps are predicted from, u itself by default."""
        u = zero_padding(u, layout.padding)
        start = fresh_lengths(u.shape[0], u.device)
        taps, softmax = self.taps_or_logits(u if query is None else query, start, layout.lengths_of(u))
        return self._with_bias(tap_conv(u, taps, self.config.before, softmax=softmax))

    def convolve_step(
        self, u: Tensor, new: Tensor | None, state: ShortConvState, query: Tensor | None = None
    ) -> tuple[Tensor, ShortConvState]:
        """The next chunk u (batch, time, conv_dim) of a stream, of which the first new[b] positions are tokens."""
        if state.room is not None and new is None and u.shape[1] == 1 and may_gather(u, state.inputs):
            return self._convolve_token(u, state, query)
        extended = state.followed_by(u)
        end = advanced(state.lengths, new, u.shape[1])
        taps, softmax = self.taps_or_logits(u if query is None else query, state.lengths, end)
        inputs = keep_last(extended, new, self.config.kernel_size - 1, dim=1)
        after = ShortConvState(end, inputs, inputs.shape[1])
        return self._with_bias(tap_conv_extended(extended, taps, softmax=softmax)), after

    def _convolve_token(
        self, u: Tensor, state: ShortConvState, query: Tensor | None = None
    ) -> tuple[Tensor, ShortConvState]:
        """The next token u (batch, 1, conv_dim) of streams whose state has room, or had: inputs stay where they are."""
        state = state.reserve(1)
        after, order = state.append(u[:, 0])
        taps, softmax = self.taps_or_logits(u if query is None else query, state.lengths, after.lengths)
        taps = normalised_taps(taps, softmax)
        y = gathered_conv(state.inputs, taps if taps.dim() == 2 else taps[:, 0], order, state.first)
        return self._with_bias(y[:, None]), after

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self.conv_bias is None else y + self.conv_bias

    # ------------------------------------------------------------------ the block

    def reads_from(self, start: int) -> int:
        return max(0, start - self.config.before)

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        return self._leave(self.convolve(self._enter(x), layout)), None

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> ShortConvState:
        inputs = torch.zeros(batch, self.config.kernel_size - 1, self.config.width, device=device, dtype=dtype)
        return ShortConvState(fresh_lengths(batch, device), inputs, inputs.shape[1])

    def step(self, x: Tensor, new: Tensor | None, state: ShortConvState) -> tuple[Tensor, ShortConvState]:
        y, state = self.convolve_step(self._enter(x), new, state)
        return self._leave(y), state

    def _enter(self, x: Tensor) -> Tensor:
        if self.in_proj is None:
            return x
        return F.glu(self.in_proj(x)) if self.config.glu else self.in_proj(x)

    def _leave(self, y: Tensor) -> Tensor:
        return dropout(y if self.out_proj is None else self.out_proj(y), self.config.dropout, self.training)
