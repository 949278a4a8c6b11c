"""The causal scan of linear attention: sums over the past whose scale only ever shrinks.

    y_i = q_i^T S_i        S_i = sum_{j <= i} exp(l_j - l_i) k_j v_j^T + exp(l_before - l_i) before

l is the logarithm of the scale, which never falls.
"""

from torch import Tensor

from subquad.kernels.dispatch import choose
from subquad.kernels.scan.reference import running_maximum as running_maximum


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, channels) and the last S (batch, heads, width, channels), by the equation above.

    q, k: (batch, heads, time, width); v: (batch, heads, time, channels); log_scale: l (batch, heads, time),
    never falling and never below log_scale_before (batch, heads); before: like S. Gradients flow to q, k, v and before:
    l is a constant.
    """
    return choose("scan", q).causal_sums(q, k, v, log_scale.detach(), before, log_scale_before.detach())
