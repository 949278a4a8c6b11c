"""Randomized attention: each query attends through one random feature, drawn around the query and a key.

Equation:
    pi_ij = softmax_j(q_i . k_j / sqrt(d))
    mu_i = q_i + k_J with J drawn from pi_i     ("sampled"), or
           q_i + mean_j k_j                     ("mean"), or
           q_i + sum_j pi_ij k_j                ("softmax")
    omega_i = mu_i, plus N(0, 1) while training
    y_i = sum_j softmax_j((omega_i . k_j - |k_j|^2 / 2) / sqrt(d)) v_j          per head

Cost: O(T^2 C) time, O(T^2) memory. It is the exact scheme that lara and eva approximate, kept for comparison.
"sampled" is random in evaluation too.

Citation: Zheng et al., "Linear complexity randomized self-attention mechanism", ICML 2022.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from subquad.kernels.precision import at_least_float32, full_precision
from subquad.mixers import noise
from subquad.mixers.attention import AttentionConfig, AttentionMixer
from subquad.mixers.base import Capabilities
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register


class RAConfig(AttentionConfig):
    proposal: Literal["sampled", "mean", "softmax"] = Field(
        "sampled",
        description="what is added to a query: a key drawn from its attention, the mean key, the attended key",
    )


@register("ra")
class RA(AttentionMixer[RAConfig]):
    capabilities = Capabilities(causal=False, cross=False, grid=False, state="none", linear=False, averages=True)
    examples = ({"proposal": "mean"}, {"proposal": "softmax"})

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        q, k, v = (at_least_float32(t) for t in self.project(x))
        padding = None if layout.padding is None else layout.padding[:, None, None, :]
        with full_precision(x):
            omega = q + self._proposed(q, k, layout, padding)
            if self.training:
                omega = omega + noise.normal(omega.shape, omega)
            exponent = omega @ k.transpose(-1, -2) - k.square().sum(-1)[:, :, None, :] / 2
            heads = _softmax(exponent * self.scale, padding) @ v
        return self.merge_heads(heads), None

    def _proposed(self, q: Tensor, k: Tensor, layout: Layout, padding: Tensor | None) -> Tensor:
        """What moves each query towards the keys: (batch, heads, time or 1, d)."""
        if self.config.proposal == "mean":
            if layout.mask is None or layout.lengths is None:
                return k.mean(2, keepdim=True)
            weight = layout.mask.to(k.dtype) / layout.lengths[:, None]
            return weight[:, None, None, :] @ k
        pi = _softmax(q @ k.transpose(-1, -2) * self.scale, padding)
        if self.config.proposal == "softmax":
            return pi @ k
        index = noise.categorical(pi.detach())
        return k.gather(2, index[..., None].expand_as(q))


def _softmax(logits: Tensor, padding: Tensor | None) -> Tensor:
    """Over the keys of (batch, heads, time, time), of which padded ones (batch, 1, 1, time) get no weight."""
    if padding is not None:
        logits = logits.masked_fill(padding, float("-inf"))
    return logits.softmax(-1)
