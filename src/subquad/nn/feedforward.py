"""The feed-forward network of each token: fc2(act(fc1 x)), or fc2(act(a) * b) with [a | b] = fc1 x.

Optionally a 3 x 3 depthwise convolution on the grid follows fc1.
"""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.dropout import dropout
from subquad.mixers.attention import init_xavier

Activation = Literal["relu", "gelu", "silu", "glu", "reglu", "geglu", "swiglu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": F.sigmoid,
    "reglu": F.relu,
    "geglu": F.gelu,
    "swiglu": F.silu,
}


class FeedForward(nn.Module):
    """Maps x (batch, time, dim) to a tensor of the same shape."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        convolution: bool = False,
    ) -> None:
        """dropout: its rate after the activation. convolution: whether fc1 is followed by the convolution."""
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.fc1 = nn.Linear(dim, 2 * ffn_dim if activation in GATED_ACTIVATIONS else ffn_dim, bias=bias)
        self.fc2 = nn.Linear(ffn_dim, dim, bias=bias)
        width = self.fc1.out_features
        self.neighbours = nn.Conv2d(width, width, 3, padding=1, groups=width) if convolution else None
        init_xavier(self.fc1)
        init_xavier(self.fc2)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        u = self.fc1(x)
        if self.neighbours is not None:
            if grid is None:
                raise ValueError("a feed-forward network with a convolution needs the grid of its tokens")
            u = self.neighbours(u.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
        if self.activation in GATED_ACTIVATIONS:
            a, b = u.chunk(2, -1)
            u = GATED_ACTIVATIONS[self.activation](a) * b
        else:
            u = ACTIVATIONS[self.activation](u)
        return self.fc2(dropout(u, self.dropout, self.training))
