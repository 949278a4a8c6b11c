"""A small mechanism that keeps the whole contract, in all forms: a weighted mean; faulty_mixers.py breaks copies."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.precision import at_least_float32, full_precision
from subquad.mixers import Capabilities, CrossState, Layout, Mixer, MixerConfig, State, noise
from subquad.mixers.layout import right_padded
from subquad.mixers.state import advanced, fresh_lengths


@dataclass
class MeanState(State):
    """total: (batch, C + 1), the weighted values of the tokens read and the sum of weights, in float32 at least."""

    total: Tensor


@dataclass
class MeanContext(CrossState):
    """total: the same of a context."""

    total: Tensor


class Mean(Mixer[MixerConfig]):
    """Weighted mean: every token becomes the mean of the tokens it sees.

    Equation:
        y_t = W_out (sum_j a_j v_j / sum_j a_j),  v = W_v x,  a_j = exp(tanh(w . x_j));  causal: j <= t;  on a grid: j
        in the row of t
    """

    capabilities = Capabilities(causal=True, cross=True, grid=True, state="two sums, O(1)", averages=True)
    state_type: ClassVar[type[State]] = MeanState
    context_type: ClassVar[type[CrossState]] = MeanContext

    def setup(self) -> None:
        dim = self.config.dim
        self.value, self.weight, self.out = nn.Linear(dim, dim), nn.Linear(dim, 1), nn.Linear(dim, dim)

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        terms = self.terms(x, layout.mask)
        with full_precision(x):
            if self.config.causal:
                return self.ratio(terms.cumsum(1)), None
            if layout.grid is not None:
                rows = terms.unflatten(1, layout.grid)
                return self.ratio(rows.sum(2, keepdim=True).expand_as(rows).flatten(1, 2)), None
            return self.ratio(terms.sum(1, keepdim=True).expand_as(terms)), None

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[a v | a] of every position, (batch, time, C + 1); zeros where there is no token."""
        value, weight = at_least_float32(self.value(x)), at_least_float32(self.weight(x)).tanh().exp()
        if self.training:
            weight = weight * (1 + 0.1 * noise.normal(weight.shape, weight).tanh())
        terms = torch.cat([weight * value, weight], -1)
        return terms if mask is None else terms * mask[..., None]

    def ratio(self, total: Tensor) -> Tensor:
        mean = total[..., :-1] / total[..., -1:].clamp(min=1e-9)
        with torch.autocast("cpu", enabled=False):
            return self.out(mean.to(self.out.weight.dtype))

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> MeanState:
        kept = torch.promote_types(dtype, torch.float32)
        return MeanState(fresh_lengths(batch, device), torch.zeros(batch, self.config.dim + 1, dtype=kept))

    def step(self, x: Tensor, new: Tensor | None, state: MeanState) -> tuple[Tensor, MeanState]:
        terms = self.terms(x, None if new is None else right_padded(new, x.shape[1]))
        with full_precision(x):
            totals = state.total[:, None] + terms.cumsum(1)
            y = self.ratio(totals)
        return y, MeanState(advanced(state.lengths, new, x.shape[1]), totals[:, -1].clone())

    def encode_context(self, context: Tensor, layout: Layout) -> MeanContext:
        return MeanContext(fresh_lengths(context.shape[0], None), self.terms(context, layout.mask).sum(1))

    def attend_context(self, x: Tensor, memory: MeanContext) -> Tensor:
        gate = at_least_float32(x[..., :1]).sigmoid()  # so that queries matter
        return self.ratio(memory.total[:, None] * torch.ones_like(gate)) * gate.to(self.out.weight.dtype)
