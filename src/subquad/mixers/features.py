"""Random projections and the feature maps of linear attention.

A feature map phi gives every token t (a query or a key of one head, d wide) features with phi(q).phi(k) ~ kernel(q, k).
Maps with exponentials must be kept from overflowing, so each gives `values` and a `log_scale`, which mean

    phi(t) = values * exp(log_scale - reference) + eps

where the mechanism chooses the reference: a maximum of `log_scale` over the tokens that may know of each other.
"""

import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.feature_attention.reference import scores_of
from subquad.mixers import noise
from subquad.mixers.attention import init_small

Scheme = Literal["redrawn", "fixed", "learnable"]


def orthogonal_projection(heads: int, features: int, head_dim: int) -> Tensor:
    """(heads, m, d) float32: rows in orthogonal blocks of d, each as long as a vector of d normal values.

    Draws, head by head: one (d, d) for each begun block of rows, then one (m, d) for the lengths. As in the original
    the signs of Q are those of the QR routine, most of its diagonal negative, so that features have a small bias
    that no number of them removes.
    """
    like = torch.empty(0, dtype=torch.float32)
    matrices = []
    for _ in range(heads):
        blocks = []
        for first in range(0, features, head_dim):
            q, _ = torch.linalg.qr(noise.normal((head_dim, head_dim), like))
            blocks.append(q.T[: features - first])
        lengths = noise.normal((features, head_dim), like).norm(dim=1, keepdim=True)
        matrices.append(lengths * torch.cat(blocks))
    return torch.stack(matrices)


class Projection(nn.Module):
    """The matrix W (heads, m, d) of random features.

    fixed: a buffer. learnable: a parameter. redrawn: a buffer too, but while training every call gives fresh normal
    values instead. `matrix` starts orthogonal in all three.
    """

    matrix: Tensor

    def __init__(self, heads: int, features: int, head_dim: int, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme
        matrix = orthogonal_projection(heads, features, head_dim)
        if scheme == "learnable":
            self.matrix = nn.Parameter(matrix)
        else:
            self.register_buffer("matrix", matrix)

    def forward(self) -> Tensor:
        """The matrix to use now: (heads, m, d)."""
        if self.scheme == "redrawn" and self.training:
            return noise.normal(self.matrix.shape, self.matrix)
        return self.matrix


class Features(NamedTuple):
    """values: (batch, heads, time, width); log_scale: (batch, heads, time). See the module docstring."""

    values: Tensor
    log_scale: Tensor


Reference = Callable[[Tensor], Tensor]
"""From `log_scale` of tokens (batch, heads, time) to what each is measured against, broadcastable to them."""


class FeatureMap(nn.Module):
    """t (batch, heads, time, d), W (heads, m, d) or None -> Features, in the precision of t."""

    projected: ClassVar[bool] = False
    """Whether the map needs W."""
    eps: ClassVar[float] = 0.0
    """What is added to every feature after scaling. Maps that never scale have theirs in the values."""
    shares_query_scale: ClassVar[bool] = False
    """Whether queries too are measured against other queries; otherwise each is its own reference."""

    def __init__(self, heads: int, features: int, head_dim: int) -> None:  # noqa: ARG002
        super().__init__()
        self.width = features

    def forward(self, t: Tensor, matrix: Tensor | None) -> Features:
        values = self.values(t, matrix)
        return Features(values, values.new_zeros(values.shape[:-1]))

    def values(self, t: Tensor, matrix: Tensor | None) -> Tensor:
        """Features of a map that never scales: (batch, heads, time, width)."""
        raise NotImplementedError

    def scaled(self, t: Tensor, matrix: Tensor | None, reference: Reference) -> Tensor:  # noqa: ARG002
        """values * exp(log_scale - reference(log_scale)), with fewer passes over memory where the map allows."""
        return self.values(t, matrix)


def scores(t: Tensor, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
    """`scores_of`, for a map that always has its matrix."""
    assert matrix is not None
    return scores_of(t, matrix)


class PositiveExponential(FeatureMap):
    """favorp: m^(-1/2) exp(y - c - max y) + 1e-4; unbiased for exp(q.k / sqrt(d)), always positive."""

    projected = True
    eps = 1e-4

    def forward(self, t: Tensor, matrix: Tensor | None) -> Features:
        y, c = scores(t, matrix)
        log_scale = noise.constant(y).amax(-1)
        return Features((y - (c + log_scale)[..., None]).exp() * self.width**-0.5, log_scale)

    def scaled(self, t: Tensor, matrix: Tensor | None, reference: Reference) -> Tensor:
        y, c = scores(t, matrix)
        shift = -c - reference(noise.constant(y).amax(-1)) - math.log(self.width) / 2
        return (y + shift[..., None]).exp()


class ProjectedRelu(FeatureMap):
    """relu: relu(m^(-1/2) y) + 1e-3."""

    projected = True

    def values(self, t: Tensor, matrix: Tensor | None) -> Tensor:
        return (scores(t, matrix)[0] * self.width**-0.5).relu() + 1e-3


class Fourier(FeatureMap):
    """fourier: exp(c) m^(-1/2) [sin y | cos y]; unbiased for exp(q.k / sqrt(d)), of either sign."""

    projected = True
    shares_query_scale = True

    def __init__(self, heads: int, features: int, head_dim: int) -> None:
        super().__init__(heads, features, head_dim)
        self.width = 2 * features

    def forward(self, t: Tensor, matrix: Tensor | None) -> Features:
        y, c = scores(t, matrix)
        return Features(torch.cat([y.sin(), y.cos()], -1) * y.shape[-1] ** -0.5, c)

    def scaled(self, t: Tensor, matrix: Tensor | None, reference: Reference) -> Tensor:
        values, log_scale = self(t, matrix)
        return values * (log_scale - reference(log_scale)).exp()[..., None]


class ParameterFree(FeatureMap):
    """dpfp: z = [relu(t) | relu(-t)] times z rolled by 1 .. nu, side by side; nu = floor(floor(m / d) / 2)."""

    def __init__(self, heads: int, features: int, head_dim: int) -> None:
        super().__init__(heads, features, head_dim)
        self.rolls = features // head_dim // 2
        assert self.rolls >= 1, "dpfp needs features >= 2 * head_dim"
        self.width = 2 * head_dim * self.rolls

    def values(self, t: Tensor, matrix: Tensor | None) -> Tensor:  # noqa: ARG002
        z = torch.cat([t, -t], -1).relu()
        return torch.cat([z * z.roll(shift, -1) for shift in range(1, self.rolls + 1)], -1)


class LearnedFourier(FeatureMap):
    """mlp-fourier: relu(linear(d^(-1/2) [cos R t | sin R t])), learned R (heads, m/2, d), one linear map for all."""

    def __init__(self, heads: int, features: int, head_dim: int) -> None:
        super().__init__(heads, features, head_dim)
        assert features % 2 == 0, "mlp-fourier needs an even number of features"
        self.frequencies = nn.Parameter(0.02 * torch.randn(heads, features // 2, head_dim))
        self.linear = nn.Linear(features, features)
        init_small(self.linear)

    def values(self, t: Tensor, matrix: Tensor | None) -> Tensor:  # noqa: ARG002
        p = t @ self.frequencies.to(t.dtype).transpose(-1, -2)
        waves = torch.cat([p.cos(), p.sin()], -1) * t.shape[-1] ** -0.5
        if not isinstance(self.linear, nn.Linear):  # an adapter took its place, such as LoRA's
            return self.linear(waves.to(self.linear.weight.dtype)).to(t.dtype).relu()
        return F.linear(waves, self.linear.weight.to(t.dtype), self.linear.bias.to(t.dtype)).relu()


class PlainRelu(FeatureMap):
    """relu-only: relu(t) + 0.1."""

    def __init__(self, heads: int, features: int, head_dim: int) -> None:
        super().__init__(heads, features, head_dim)
        self.width = head_dim

    def values(self, t: Tensor, matrix: Tensor | None) -> Tensor:  # noqa: ARG002
        return t.relu() + 0.1


class PlainSigmoid(PlainRelu):
    """sigmoid-only: sigmoid(t) + 0.1."""

    def values(self, t: Tensor, matrix: Tensor | None) -> Tensor:  # noqa: ARG002
        return t.sigmoid() + 0.1


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "favorp": PositiveExponential,
    "relu": ProjectedRelu,
    "fourier": Fourier,
    "dpfp": ParameterFree,
    "mlp-fourier": LearnedFourier,
    "relu-only": PlainRelu,
    "sigmoid-only": PlainSigmoid,
}
