"""Landmark attention in plain torch: the definition, in every precision and on every device."""

import torch
from torch import Tensor

from subquad.kernels.landmark_attention import LEAST_WEIGHT, OptWeights
from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32, full_precision


def landmark_attention(
    qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, opt: OptWeights | None, mask: Tensor | None
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    scale, rows = q.shape[-1] ** -0.5, None if mask is None else mask[:, None, None, :]
    with full_precision(qkv):
        q, k, w_keys, w_queries, shared = (at_least_float32(t) for t in (q, k, w_keys, w_queries, shared))
        log_k = keep((scale * w_keys) @ k.transpose(-1, -2) - (k.square().sum(-1) * (scale / 2)).unsqueeze(-2), rows)
        u = log_k.softmax(-1).to(v.dtype) @ v
        offset = shared + log_k.logsumexp(-1, keepdim=True)
        logits = q @ (scale * w_queries).transpose(-1, -2) + offset.transpose(-1, -2)
        if opt is not None:
            logits = logits + _log_weights(q, opt, rows)
        return (logits.softmax(-1).to(v.dtype) @ u).transpose(1, 2)


def _log_weights(q: Tensor, opt: OptWeights, mask: Tensor | None) -> Tensor:
    """log a_ci of queries (batch, heads, time, d): (batch, heads, time, c)."""
    directions, balance, mean_weights = (at_least_float32(t) for t in opt[:3])
    t = keep((q.shape[-1] ** -0.5 * directions) @ q.transpose(-1, -2), mask).softmax(-1)
    specific = t - mean_weights[:, None, None, :] @ t
    weights = torch.addcmul(balance, specific, torch.full_like(balance, opt.alpha))
    return weights.clamp(min=LEAST_WEIGHT).log().transpose(-1, -2)
