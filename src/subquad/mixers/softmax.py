"""Scaled dot-product attention, the baseline.

Equation:
    y_i = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j          per head; causal: j <= i

Cost: O(T^2 C) time; memory O(T C) through torch's fused kernels, O(T^2) where they do not apply.
Streaming keeps all keys and values: O(T) per token.

Citation: Vaswani et al., "Attention is all you need", NeurIPS 2017.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.kernels import tracing
from subquad.kernels.gathered import gathered_attention, may_gather
from subquad.mixers.attention import AttentionConfig, AttentionMixer
from subquad.mixers.base import Capabilities
from subquad.mixers.layout import Layout, right_padded
from subquad.mixers.registry import register
from subquad.mixers.state import (
    CrossState,
    State,
    advanced,
    extend,
    fresh_lengths,
    select_rows,
    with_room,
)

FEW_QUERIES = 16
"""Decoding has so few queries at a time that torch's fused kernel on the CPU costs more than it saves."""


class SoftmaxConfig(AttentionConfig):
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the attention probabilities")
    head_dim: int | None = Field(None, ge=1, description="width of a head; default C / heads")
    out_projection: bool = Field(True, description="output linear map with bias; without it heads are concatenated")
    out_bias: bool = Field(True, description="bias of the output map")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    def check(self) -> None:
        self.check_rotary()
        if self.head_dim is None:
            super().check()
        elif not self.out_projection and self.head_dim * self.heads != self.dim:
            raise ValueError(
                f"{self.heads} heads of {self.head_dim} channels need out_projection=True to give {self.dim}"
            )


@dataclass
class SoftmaxState(State):
    """k, v: (batch, heads, capacity, d), empty from a row's length on. ragged: lengths may differ.

    room: how many places at the end of k and v no row has reached; None: only the lengths tell.
    order: (batch, filled) int64, the row of k and v that holds each entry of a row; None: its own. A CPU moves the
    order of a state with room, and leaves keys and values where they are.
    """

    k: Tensor
    v: Tensor
    ragged: bool
    room: int | None = 0
    order: Tensor | None = None

    @property
    def filled(self) -> int:
        return self.k.shape[2] - (self.room or 0)

    def reorder(self, index: Tensor) -> Self:
        lengths = self.lengths.index_select(0, index)
        if self.order is not None:
            return replace(self, lengths=lengths, order=self.order.index_select(0, index))
        if self.room and self.filled and not self.ragged and self.k.device.type == "cpu":
            return replace(self, lengths=lengths, order=index[:, None].expand(-1, self.filled))
        k, v = (select_rows(part, index, self.filled) for part in (self.k, self.v))
        room = None if self.room is None else k.shape[2] - self.filled
        return replace(self, lengths=lengths, k=k, v=v, room=room)

    def in_order(self) -> Self:
        """The state with keys and values in the rows that they belong to."""
        if self.order is None:
            return self
        places = torch.arange(self.filled, device=self.k.device)
        k, v = (part.transpose(1, 2)[self.order, places].transpose(1, 2) for part in (self.k, self.v))
        return replace(self, k=k, v=v, room=0, order=None)

    def reserve(self, tokens: int) -> Self:
        if self.room is not None and self.room >= tokens and self.k.shape[0] >= self.lengths.shape[0]:
            return self
        state = self.in_order()
        k, v = (with_room(part, self.filled, tokens) for part in (state.k, state.v))
        return replace(state, k=k, v=v, room=None if self.room is None else k.shape[2] - self.filled)

    def with_fixed_size(self) -> Self:
        if self.order is not None:
            return self.in_order().reserve(self.room or 0).with_fixed_size()
        for part in (self.k, self.v):
            part[:, :, self.filled :] = 0  # what weights of 0 meet must be finite
        return replace(self, room=None)


@dataclass
class SoftmaxContext(CrossState):
    """k, v of the context: (batch, heads, time', d), right padded to `lengths`."""

    k: Tensor
    v: Tensor
    padded: bool


SoftmaxConfigT = TypeVar("SoftmaxConfigT", bound=SoftmaxConfig)


class SoftmaxHeads(AttentionMixer[SoftmaxConfigT]):
    """Softmax over keys, exact or compressed, with heads of any width."""

    def output_map(self) -> nn.Module:
        if not self.config.out_projection:
            return nn.Identity()
        return nn.Linear(self.inner, self.config.dim, bias=self.config.out_bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        drop = self.config.attention_dropout if self.training else 0.0
        plain = not (drop or causal or torch.is_grad_enabled() or tracing.is_exporting() or tracing.is_transformed())
        if plain and q.shape[2] <= FEW_QUERIES and q.device.type == "cpu":
            return _attend_plainly(q, k, v, mask)
        # torch's fused kernels have no rules for forward-mode differentiation
        with sdpa_kernel(SDPBackend.MATH) if tracing.is_transformed() else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal=causal)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The equation as it stands: one table of weights for every query."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(mask.logical_not(), -float("inf"))
    return scores.softmax(-1) @ v


@register("softmax")
class Softmax(SoftmaxHeads[SoftmaxConfig]):
    capabilities = Capabilities(
        causal=True, cross=True, grid=False, state="keys and values, O(T)", linear=False, averages=True
    )
    state_type, context_type = SoftmaxState, SoftmaxContext
    examples = ({}, {"head_dim": 3}, {"qkv_bias": False, "out_projection": False}, {"rotary": True})

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        q, k, v = self.project(x)
        if layout.mask is None:
            return self.merge_heads(self.attend(q, k, v, causal=self.config.causal)), None
        mask = layout.mask[:, None, None, :]
        if self.config.causal:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return self.merge_heads(self.attend(q, k, v, mask)), None

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> SoftmaxState:
        empty = torch.zeros(batch, self.config.heads, 0, self.config.head_width, device=device, dtype=dtype)
        return SoftmaxState(fresh_lengths(batch, device), empty, empty, ragged=False)

    def step(self, x: Tensor, new: Tensor | None, state: SoftmaxState) -> tuple[Tensor, SoftmaxState]:
        q, k, v = self.project(x, state.lengths)
        if state.order is not None and new is None and x.shape[1] == 1 and may_gather(q, state.k):
            return self._step_in_order(q, k, v, state)
        state = state.in_order()
        time, room, ragged = x.shape[1], state.room, state.ragged or new is not None
        lengths = advanced(state.lengths, new, time)
        rows = (state.lengths, right_padded(lengths - state.lengths, time)) if ragged or room is None else None
        k, v = (extend(old, one, room, rows) for old, one in ((state.k, k), (state.v, v)))
        after = SoftmaxState(lengths, k, v, ragged, None if room is None else max(0, room - time))
        k, v, mask = k[:, :, : after.filled], v[:, :, : after.filled], None
        if rows is not None or time > 1:  # else the one newest token of every row sees all
            position = state.lengths[:, None] + torch.arange(time, device=x.device)
            mask = (torch.arange(k.shape[2], device=x.device) <= position[..., None])[:, None]
        return self.merge_heads(self.attend(q, k, v, mask)), after

    def _step_in_order(self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState) -> tuple[Tensor, SoftmaxState]:
        """A step of one token (batch, heads, 1, d) that reads keys and values where an order says that they are."""
        state, rows = state.reserve(1), torch.arange(q.shape[0], device=q.device)[:, None]
        assert state.room
        before = rows.expand(-1, state.filled) if state.order is None else state.order
        for buffer, one in ((state.k, k), (state.v, v)):
            buffer[: len(rows), :, state.filled] = one[:, :, 0]
        order = torch.cat([before, rows], 1)
        after = replace(state, lengths=state.lengths + 1, room=state.room - 1, order=order)
        y = gathered_attention(q[:, :, 0], state.k, state.v, order, after.lengths)
        return self.project_out(y[:, None]), after

    def encode_context(self, context: Tensor, layout: Layout) -> SoftmaxContext:
        k, v = self.project_part(context, 1, 3)
        if not torch.is_grad_enabled():  # many steps will read them
            k, v = k.contiguous(), v.contiguous()
        return SoftmaxContext(layout.lengths_of(context), k, v, layout.mask is not None)

    def attend_context(self, x: Tensor, memory: SoftmaxContext) -> Tensor:
        (q,) = self.project_part(x, 0, 1)
        if q.shape[2] <= FEW_QUERIES and may_gather(q, memory.k) and memory.k.is_contiguous():
            return self._attend_by_row(q, memory)
        mask = right_padded(memory.lengths, memory.k.shape[2])[:, None, None, :] if memory.padded else None
        return self.merge_heads(self.attend(q, memory.k, memory.v, mask))

    def _attend_by_row(self, q: Tensor, memory: SoftmaxContext) -> Tensor:
        """Attention of a few queries (batch, heads, time, d) of each row, each on its own, to the row's context."""
        batch, heads, time, width = q.shape
        rows = torch.arange(batch, device=q.device).repeat_interleave(time)
        queries = q.transpose(1, 2).reshape(batch * time, heads, width)
        y = gathered_attention(queries, memory.k, memory.v, rows[:, None], memory.lengths[rows])
        return self.project_out(y.view(batch, time, heads, width))
