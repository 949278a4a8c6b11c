"""ScatterBrain: exact attention inside a window, random features for all the rest.

Equation, per head, with log features a(t) = W t d^-1/4 - |t|^2 d^-1/2 / 2 - log(m) / 2 (m of them):
    all keys, per feature:          S   = sum_j exp a(k_j),        V   = sum_j exp a(k_j) v_j
    those of window g:              S_g = sum_{j in g} exp a(k_j), V_g = sum_{j in g} exp a(k_j) v_j
    outside window g:               Z_g = log(S - S_g + 1e-5 S),   F_g = (V - V_g) / max(S - S_g, 1e-3 max_j exp a(k_j))
    y_i = sum_{j in g(i)} A_ij v_j + sum_f A_if F_{g(i), f}
    A_i = softmax over [q_i.k_j d^-1/2 + b(i, j), j in g(i) | a(q_i) + Z_{g(i)}, all features]
Windows, overlap and b are those of local. The small constants keep what is nearly nothing finite.

Cost: O(T (w + m d / w + m) C) time, O(T (C + heads (w + m d / w))) memory.

Citation: Chen et al., "Scatterbrain: unifying sparse and low-rank attention approximation", NeurIPS 2021, in the form
of the efficient-attention library.
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Scale
from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32, full_precision
from subquad.kernels.window_attention.reference import in_windows, merge_windows, window_logits
from subquad.mixers import noise
from subquad.mixers.base import Capabilities
from subquad.mixers.features import Projection
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register
from subquad.mixers.windows import WindowConfig, WindowMixer, crop


class ScatterBrainConfig(WindowConfig):
    features: int = Field(64, ge=1, description="random features m")
    projection: Literal["redrawn", "fixed", "learnable"] = Field(
        "redrawn", description="projection W: new for each training pass, fixed, or learned"
    )


@register("scatterbrain")
class ScatterBrain(WindowMixer[ScatterBrainConfig]):
    capabilities = Capabilities(causal=False, cross=False, grid=True, state="none", averages=True)
    tuned: ClassVar = {"window": Scale(0.5, 2), "features": Scale(0.5, 2)}
    examples = (
        {"window": 4, "features": 8},
        {"window": 3, "features": 6, "overlap": True, "relative": "table"},
        {"window": 5, "features": 8, "projection": "learnable"},
    )

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.projection = Projection(config.heads, config.features, config.head_width, config.projection)

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        shape = self.shape_of(x, layout)
        x, windows, mask = self.pad_to_windows(x, layout, shape)
        q, k, v = self.project(x)
        q_windows, k_windows, v_windows, mask_windows = in_windows(q, k, v, windows, mask)
        local = window_logits(q_windows, k_windows, windows, self.bias_values(windows), mask_windows)
        with full_precision(x):
            q_windows, k, k_windows, v, v_windows = (
                at_least_float32(part) for part in (q_windows, k, k_windows, v, v_windows)
            )
            matrix = at_least_float32(self.projection())
            log_k = self._log_features(matrix, k)
            if mask is not None:
                log_k = keep(log_k, mask[:, None, :, None])
            local_k = keep(self._log_features(matrix[:, None], k_windows), mask_windows.unsqueeze(-1))
            log_mass, values = self._rest(log_k, v, local_k, v_windows)
            summary = self._log_features(matrix[:, None], q_windows) + log_mass
            probs = torch.cat([local, summary], -1).softmax(-1)
            local_probs, summary_probs = probs.split([local.shape[-1], summary.shape[-1]], -1)
            y = local_probs @ v_windows + summary_probs @ values
        return crop(self.merge_heads(merge_windows(y, windows)), windows.shape, shape), None

    def _log_features(self, matrix: Tensor, t: Tensor) -> Tensor:
        """a(t) of tokens (..., N, d), with W (..., m, d): (..., N, m)."""
        projected = (t * self.scale**0.5) @ matrix.transpose(-1, -2)
        return projected - t.square().sum(-1, keepdim=True) * (self.scale / 2) - math.log(self.config.features) / 2

    def _rest(self, log_k: Tensor, v: Tensor, log_k_windows: Tensor, v_windows: Tensor) -> tuple[Tensor, Tensor]:
        """Z (batch, heads, windows, 1, m) and F (batch, heads, windows, m, d) of everything outside each window."""
        top = noise.constant(log_k.amax(2, keepdim=True))
        weight, weight_windows = (log_k - top).exp(), (log_k_windows - top.unsqueeze(2)).exp()
        total = weight.sum(2)[:, :, None] - weight_windows.sum(3)
        sums = (weight.transpose(-1, -2) @ v).unsqueeze(2) - weight_windows.transpose(-1, -2) @ v_windows
        values = sums / total.clamp(min=1e-3).unsqueeze(-1)
        everything, window = log_k.logsumexp(2, keepdim=True), log_k_windows.logsumexp(3)
        high = noise.constant(torch.maximum(everything, window))
        log_mass = high + ((everything - high).exp() - (window - high).exp() + 1e-5).log()
        return log_mass.unsqueeze(3), values
