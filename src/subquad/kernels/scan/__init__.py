"""The causal scan of linear attention: sums over the past whose scale only ever shrinks.

    y_i = q_i^T S_i        S_i = sum_{j <= i} exp(l_j - l_i) k_j [v_j, 1]^T + exp(l_before - l_i) before

l is the logarithm of the scale, which never falls. The 1 after the channels of v gives the sum of all weights.
"""

from torch import Tensor

from subquad.kernels.dispatch import choose
from subquad.kernels.scan.reference import running_maximum as running_maximum


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor, before: Tensor, log_scale_before: Tensor
) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, channels + 1) and the last S (batch, heads, width, channels + 1), by the equation above.

    q, k: (batch, heads, time, width); v: (batch, heads, time, channels), of lower precision where products may be
    taken in that; log_scale: l (batch, heads, time), never falling and never below log_scale_before (batch, heads);
    before: like S. y is in the precision of q, S in that of before. Gradients flow to q, k, v and before: l is a
    constant.
    """
    return choose("scan", q).causal_sums(q, k, v, log_scale.detach(), before, log_scale_before.detach())
