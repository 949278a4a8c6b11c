"""The causal scan of linear attention: sums over the past whose scale only ever shrinks.

y_i = q_i^T S_i        S_i = sum_{j <= i} exp(level_j - level_i) k_j v_j^T + exp(level_before - level_i) before
"""

from torch import Tensor

from subquad.kernels.dispatch import choose
from subquad.kernels.scan.reference import NO_LEVEL as NO_LEVEL
from subquad.kernels.scan.reference import running_maximum as running_maximum


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, level: Tensor, before: Tensor, level_before: Tensor
) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, channels) and the last S (batch, heads, width, channels), by the equation above.

    q, k: (batch, heads, time, width); v: (batch, heads, time, channels); level: (batch, heads, time), never falling and
    never below level_before (batch, heads); before: like S. Gradients flow to q, k, v and before: levels are constants.
    """
    return choose("scan", q).causal_sums(q, k, v, level.detach(), before, level_before.detach())
