"""Dynamic convolution: every position predicts its own softmax-normalised filters.

Equation:
    y = out_proj(c),   c_t = sum_k softmax_k(W_h u_t)_k u_{t-P+k},   u = GLU(in_proj(x))     head h's channels share W_h
    causal: P = K - 1; centred: P = (K - 1) // 2; u is zero outside the sequence, nothing is renormalised there
    (renormalise: the softmax runs over the taps inside the sequence only)

Cost: O(T C H K) time for the filters and O(T C K) for the convolution, O(T (C + H K)) memory. Streaming keeps the last
K - 1 inputs: O(1) in T.

Citation: Wu et al., "Pay Less Attention with Lightweight and Dynamic Convolutions", ICLR 2019.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32
from subquad.mixers.base import Capabilities
from subquad.mixers.registry import register
from subquad.mixers.shortconv import ShortConvConfig, ShortConvMixer


class DynamicConvConfig(ShortConvConfig):
    tap_bias: bool = Field(False, description="bias of the map that predicts taps")
    renormalise: bool = Field(False, description="softmax over the taps inside the sequence only")

    def check(self) -> None:
        super().check()
        if self.renormalise and not self.tap_softmax:
            raise ValueError("renormalise=True restricts the softmax over taps; it needs tap_softmax=True")


@register("dynamicconv")
class DynamicConv(ShortConvMixer[DynamicConvConfig]):
    capabilities = Capabilities(causal=True, cross=False, grid=False, state="last K-1 inputs, O(1)")
    examples = (
        {},
        {"kernel_size": 4, "glu": False, "conv_bias": True, "tap_bias": True},
        {"kernel_size": 3, "tap_softmax": False, "conv_dim": 8, "tap_dropout": 0.1},
        {"kernel_size": 5, "renormalise": True},
        {"kernel_size": 5, "projected": False, "glu": False},
    )

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.tap_map = nn.Linear(config.width, config.heads * config.kernel_size, bias=config.tap_bias)

    def taps(self, query: Tensor, start: Tensor, end: Tensor) -> Tensor:
        taps = at_least_float32(self._logits(query, start, end))
        if self.config.tap_softmax:
            taps = taps.softmax(-1)
        return F.dropout(taps, self.config.tap_dropout, self.training)

    def taps_or_logits(self, query: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, bool]:
        dropping = self.training and self.config.tap_dropout > 0  # between the softmax and the convolution
        if self.config.tap_softmax and not dropping:
            return self._logits(query, start, end), True
        return self.taps(query, start, end), False

    def _logits(self, query: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """What the softmax is taken of: (batch, time, heads, K)."""
        logits = self.tap_map(query).unflatten(-1, (self.config.heads, self.config.kernel_size))
        if self.config.renormalise:
            logits = keep(at_least_float32(logits), self._tap_mask(query.shape[1], start, end)[:, :, None])
        return logits

    def _tap_mask(self, time: int, start: Tensor, end: Tensor) -> Tensor:
        """False where a tap falls before the row's first token or after its last: (batch, time, K) bool.

        The tap at the position itself is always kept, so that padded positions have a softmax as well.
        """
        offset = torch.arange(self.config.kernel_size, device=start.device) - self.config.before
        position = start[:, None, None] + torch.arange(time, device=start.device)[:, None] + offset
        return ((position >= 0) & (position < end[:, None, None])) | (offset == 0)
