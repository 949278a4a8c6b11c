"""A weighted mean that keeps the contract, and copies of it that break one promise each.

Run as a test file (`test_faults.py` does so), it holds every one of them to the contract.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.mixers import Capabilities, Layout, State
from subquad.mixers.registry import register
from subquad.testing import contract
from tests.testing.mean_mixer import Mean, MeanContext, MeanState

GENERATOR = torch.Generator().manual_seed(0)
BIDIRECTIONAL = Capabilities(causal=False, cross=False, grid=False, state="none", averages=True)
GRID = Capabilities(causal=False, cross=False, grid=True, state="none", averages=True)
CROSS = Capabilities(causal=False, cross=True, grid=False, state="none", averages=True)
CAUSAL = Capabilities(causal=True, cross=False, grid=False, state="two sums", averages=True, bidirectional=False)


register("intact")(Mean)


@register("intact_causal_only")
class CausalMean(Mean):
    """The same without the forms that look both ways."""

    capabilities = CAUSAL


# ---------------------------------------------------------------------- one fault each


@register("padding_leaks")
class PaddingLeaks(Mean):
    """Padded positions count."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().terms(x, None)


@register("company_matters")
class CompanyMatters(Mean):
    """Other rows of the batch count."""

    capabilities = BIDIRECTIONAL

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        y, aux = super().mix(x, layout)
        return y + y.mean(0, keepdim=True), aux


@register("padded_cell_counts")
class PaddedCellCounts(Mean):
    """Padded cells of a grid count as tokens of zeros."""

    capabilities = GRID

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        return super().mix(x, layout if layout.grid is None else Layout(grid=layout.grid))


@register("not_finite")
class NotFinite(Mean):
    """The norm of a token of zeros, such as padding is shown as, has no gradient."""

    capabilities = BIDIRECTIONAL

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        y, aux = super().mix(x, layout)
        return y + 0 * F.linear(x, self.value.weight).square().sum(-1, keepdim=True).sqrt(), aux


@register("needs_a_row")
class NeedsARow(Mean):
    """Looks at the first row of the batch."""

    capabilities = BIDIRECTIONAL

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        assert x[0] is not None
        return super().mix(x, layout)


@register("looks_ahead")
class LooksAhead(Mean):
    """Position t sees t + 1."""

    capabilities = CAUSAL

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        y, aux = super().mix(x, layout)
        return y + 0.2 * y.roll(-1, 1), aux


@register("knows_the_length")
class KnowsTheLength(Mean):
    """Outputs depend on the length to come, though not on its tokens."""

    capabilities = replace(CAUSAL, averages=False)

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        y, aux = super().mix(x, layout)
        lengths = x.new_full((x.shape[0],), x.shape[1]) if layout.mask is None else layout.mask.sum(1).to(y.dtype)
        return y * (1 + 0.01 * lengths[:, None, None]), aux


@register("forgets_nothing")
class ForgetsNothing(Mean):
    """Says that it looks two tokens back, and sees all of them."""

    capabilities = CAUSAL

    def reads_from(self, start: int) -> int:
        return max(0, start - 2)


@register("stream_differs")
class StreamDiffers(Mean):
    """The stream forgets slowly, the pass does not."""

    capabilities = CAUSAL

    def step(self, x: Tensor, new: Tensor | None, state: MeanState) -> tuple[Tensor, MeanState]:
        decay = torch.ones_like(state.total)
        decay[:, :-1] = 0.9
        return super().step(x, new, replace(state, total=state.total * decay))


@dataclass
class StuckState(MeanState):
    def reorder(self, index: Tensor) -> "StuckState":
        rows = torch.arange(len(index)) % len(self.total)
        return StuckState(self.lengths.index_select(0, index), self.total.index_select(0, rows))


@register("state_cannot_be_reordered")
class StateCannotBeReordered(Mean):
    """Rows of the state stay where they are."""

    capabilities = CAUSAL
    state_type = StuckState

    def new_state(self, *options: Any) -> StuckState:
        return StuckState(**vars(super().new_state(*options)))

    def step(self, x: Tensor, new: Tensor | None, state: MeanState) -> tuple[Tensor, MeanState]:
        y, state = super().step(x, new, state)
        return y, StuckState(**vars(state))


@register("state_is_overwritten")
class StateIsOverwritten(Mean):
    """The state that was given is changed."""

    capabilities = CAUSAL

    def step(self, x: Tensor, new: Tensor | None, state: MeanState) -> tuple[Tensor, MeanState]:
        y, after = super().step(x, new, state)
        with torch.no_grad():
            state.total.copy_(after.total)
        return y, after


@register("foreign_states_are_read")
class ForeignStatesAreRead(Mean):
    """Takes any state that happens to fit."""

    capabilities = CAUSAL
    state_type = State

    def step(self, x: Tensor, new: Tensor | None, state: Any) -> tuple[Tensor, MeanState]:
        return super().step(x, new, state if isinstance(state, MeanState) else self.new_state(2, x.device, x.dtype))


@register("autocast_breaks_the_stream")
class AutocastBreaksTheStream(Mean):
    """Writes what autocast made half precision into a state of full precision."""

    capabilities = CAUSAL

    def step(self, x: Tensor, new: Tensor | None, state: MeanState) -> tuple[Tensor, MeanState]:
        y, after = super().step(x, new, state)
        index = torch.zeros(len(x), 1, dtype=torch.int64)
        after.total.to(x.dtype).scatter(1, index, self.weight(x)[:, 0])
        return y, after


@register("bfloat16_is_rounded")
class Bfloat16IsRounded(Mean):
    """Sums in bfloat16, and loses what is small beside them."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        terms = super().terms(x, mask)
        return terms if x.dtype != torch.bfloat16 else (terms * 4).round() / 4


@register("autocast_is_rounded")
class AutocastIsRounded(Mean):
    """The same under autocast."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        terms = super().terms(x, mask)
        return (terms * 4).round() / 4 if torch.is_autocast_enabled("cpu") else terms


class Tripled(torch.autograd.Function):
    """x, with a gradient three times too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


@register("wrong_gradient")
class WrongGradient(Mean):
    """The gradient of the weights is wrong."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        value, weight = super().terms(x, mask).split([self.config.dim, 1], -1)
        return torch.cat([value, Tripled.apply(weight)], -1)


@register("wrong_gradient_in_float32")
class WrongGradientInFloat32(WrongGradient):
    """The same in the precision of training only, as a kernel might have it."""

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().terms(x, mask) if x.dtype == torch.float32 else Mean.terms(self, x, mask)


@register("draws_of_its_own")
class DrawsOfItsOwn(Mean):
    """Training draws that no test can hold still."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        terms = super().terms(x, mask)
        return terms * (1 + 0.1 * torch.rand_like(terms)) if self.training else terms


@register("another_generator")
class AnotherGenerator(Mean):
    """Training draws that no seed of torch repeats."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        terms = super().terms(x, mask)
        return terms + torch.rand(terms.shape, generator=GENERATOR).to(terms) if self.training else terms


@register("graph_breaks")
class GraphBreaks(Mean):
    """Asks a number from a tensor, which a compiled graph cannot."""

    capabilities = BIDIRECTIONAL

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        y, aux = super().mix(x, layout)
        return (y if y.numel() == 0 or y.sum().item() < torch.inf else y * 0), aux


@register("quadratic_memory")
class QuadraticMemory(Mean):
    """Keeps a table of all pairs."""

    capabilities = BIDIRECTIONAL

    def terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        terms = super().terms(x, mask)
        return terms + 0 * (terms @ terms.transpose(-1, -2)).sigmoid().sum(-1, keepdim=True)


@register("context_padding_leaks")
class ContextPaddingLeaks(Mean):
    """Padded positions of a context count."""

    capabilities = CROSS

    def encode_context(self, context: Tensor, layout: Layout) -> MeanContext:
        return super().encode_context(context, Layout())


@dataclass
class StuckContext(MeanContext):
    def reorder(self, index: Tensor) -> "StuckContext":
        return StuckContext(self.lengths.index_select(0, index), self.total[: len(index)])


@register("context_cannot_be_reordered")
class ContextCannotBeReordered(Mean):
    """Rows of what is kept of a context stay where they are."""

    capabilities = CROSS
    context_type = StuckContext

    def encode_context(self, context: Tensor, layout: Layout) -> StuckContext:
        return StuckContext(**vars(super().encode_context(context, layout)))


for _name in list(globals()):
    if isinstance(globals()[_name], type) and issubclass(globals()[_name], Mean):
        globals()[f"Test{_name}"] = contract(globals()[_name].name)
