"""No mixing at all: a floor to compare mechanisms with, not one of them.

Equation:
    y_t = x_t

Cost: none. It has no parameters, and streaming keeps nothing but how many tokens were read.

Citation: none. A model with it reads every token by itself; what a mechanism does not reach beyond such a model is not
due to mixing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.kernels.dropout import dropout
from subquad.mixers.base import Capabilities, Mixer, MixerConfig
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register
from subquad.mixers.state import State, advanced, fresh_lengths


@dataclass
class IdentityState(State):
    """Nothing but the lengths."""


@register("identity")
class Identity(Mixer[MixerConfig]):
    capabilities = Capabilities(causal=True, cross=False, grid=False, state="nothing, O(1)")
    state_type = IdentityState
    is_floor = True

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:  # noqa: ARG002
        return dropout(x, self.config.dropout, self.training), None

    def reads_from(self, start: int) -> int:
        return start

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> IdentityState:  # noqa: ARG002
        return IdentityState(fresh_lengths(batch, device))

    def step(self, x: Tensor, new: Tensor | None, state: IdentityState) -> tuple[Tensor, IdentityState]:
        y = dropout(x, self.config.dropout, self.training)
        return y, IdentityState(advanced(state.lengths, new, x.shape[1]))
