"""Lightweight convolution: one softmax-normalised filter per head, the same at every position.

Equation:
    y = out_proj(c),   c_t = sum_k softmax_k(w_h)_k u_{t-P+k},   u = GLU(in_proj(x))     head h's channels share w_h (K)
    causal: P = K - 1; centred: P = (K - 1) // 2; u is zero outside the sequence, nothing is renormalised there

Cost: O(T C K) time besides the linear maps, O(T C) memory, H K filter parameters. Streaming keeps the last K - 1
inputs: O(1) in T.

Citation: Wu et al., "Pay Less Attention with Lightweight and Dynamic Convolutions", ICLR 2019.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.precision import at_least_float32, full_precision
from subquad.mixers.base import Capabilities
from subquad.mixers.registry import register
from subquad.mixers.shortconv import ShortConvConfig, ShortConvMixer


class LightConvConfig(ShortConvConfig):
    pass


@register("lightconv")
class LightConv(ShortConvMixer[LightConvConfig]):
    capabilities = Capabilities(causal=True, cross=False, grid=False, state="last K-1 inputs, O(1)")
    examples = (
        {},
        {"kernel_size": 4, "glu": False, "conv_bias": True},
        {"kernel_size": 3, "tap_softmax": False, "conv_dim": 8, "tap_dropout": 0.1},
        {"kernel_size": 5, "projected": False, "glu": False},
    )

    def setup(self) -> None:
        super().setup()
        # drawn as (H, 1, K), the shape of a grouped filter, which sets the bound of the uniform distribution
        drawn = nn.init.xavier_uniform_(torch.empty(self.config.heads, 1, self.config.kernel_size))
        self.filters = nn.Parameter(drawn.squeeze(1))
        self.constant_taps: Tensor | None
        self.register_buffer("constant_taps", None, persistent=False)

    @torch.no_grad()
    def freeze_constants(self) -> None:
        taps = at_least_float32(self.filters)
        self.constant_taps = taps.softmax(-1) if self.config.tap_softmax else taps

    def taps(self, query: Tensor, start: Tensor, end: Tensor) -> Tensor:  # noqa: ARG002
        if self.constant_taps is not None:
            return self.constant_taps
        with full_precision(self.filters):
            taps = at_least_float32(self.filters)
            if self.config.tap_softmax:
                taps = taps.softmax(-1)
            if self.training and self.config.tap_dropout:  # every position loses taps of its own
                taps = F.dropout(taps.expand(*query.shape[:2], -1, -1), self.config.tap_dropout)
            return taps
