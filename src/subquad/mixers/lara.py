"""LARA: linear randomized attention, by multiple importance sampling around landmarks.

Equation, per head, with s = d^-1/2 and phi(w, t) = s w.t - s |t|^2 / 2:
    landmarks q~_c, k~_c: means of queries and keys over min(T, M) segments of the sequence, whose sizes differ by at
    most one token (the longer ones come last), or over the cells of a square on the grid, n x n with n^2 <= M; by
    default M = min(49, max(16, floor(T / 8))) on a sequence, and 49 on a grid
    mu_c = q~_c + k~_c,  omega_c = mu_c (+ N(0, 1) in training),  D_cc' = phi(omega_c, mu_c')
    F_c = sum_j softmax_j(phi(omega_c, k_j)) v_j
    y_i = sum_c softmax_c( log alpha_ci + phi(omega_c, q_i) + LSE_j phi(omega_c, k_j) - log p_c ) F_c
    weights bh:     alpha = 1,                          log p_c = LSE_c' D_cc'
            biased: log alpha_ci = s mu_c.q_i,          log p_c = LSE_c' D_cc'
            opt:    alpha_ci = max(exp(D_cc - LSE_c' D_cc') + alpha (t_ci - mean_c t_ci), 1e-8),  log p_c = D_cc,
                    t_ci = softmax over queries i of s q~_c.q_i

Cost: O(T M C) time and O(T (C + heads M)) memory for M landmarks.

Citation: Zheng, Wang, Kong, "Linear complexity randomized self-attention mechanism", ICML 2022.
"""

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Choices
from subquad.kernels import tracing
from subquad.kernels.landmark_attention import OptWeights, landmark_attention
from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32, cast_once, full_precision
from subquad.mixers import noise
from subquad.mixers.attention import AttentionConfig, AttentionMixer, HeadMap, init_small, kernel_logits
from subquad.mixers.base import Capabilities
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register

LEAST_LANDMARKS, MOST_LANDMARKS, TOKENS_PER_LANDMARK = 16, 49, 8
"""By default, on sequences: more than one in eight tokens would cost as much as exact attention of short inputs."""


class LARAConfig(AttentionConfig):
    landmarks: int | None = Field(
        None,
        ge=1,
        description=f"number of landmarks M; on a grid the largest square up to M; default {MOST_LANDMARKS}, on a "
        f"sequence one for {TOKENS_PER_LANDMARK} tokens, but at least {LEAST_LANDMARKS} and at most {MOST_LANDMARKS}",
    )
    proposal: Literal["pool", "plain-pool", "adaptive"] = Field(
        "pool",
        description="landmarks on a grid: pooled and mapped by linear + layer norm, or pooled as they are; adaptive: "
        "every token is mapped, then averaged over segments (a grid is read as a sequence). On sequences both pools "
        "are plain means of segments",
    )
    landmark_mixing: Literal["none", "keys", "values"] = Field(
        "none",
        description="pooled keys attend to each other on a grid, plainly or weighted by the norm of pooled values",
    )
    pool_proj: Literal["light", "dense"] = Field(
        "light", description="the map of pooled landmarks: shared by the heads, or over all channels"
    )
    weights: Literal["opt", "bh", "biased"] = Field("opt", description="weights of multiple importance sampling")
    alpha: float = Field(1.0, description="coefficient of the query-specific part of the opt weights")
    num_samples: Literal["single", "antithetic", "multi"] = Field(
        "single", description="samples of each landmark in training: one, two of opposite noise, or two"
    )

    def num_landmarks(self, length: int) -> int:
        """The landmarks M of a sequence of this length."""
        return self.landmarks or min(MOST_LANDMARKS, max(LEAST_LANDMARKS, length // TOKENS_PER_LANDMARK))

    def check(self) -> None:
        super().check()
        if self.pool_proj == "dense" and self.proposal != "pool":
            raise ValueError("pool_proj='dense' belongs to proposal='pool'")


class Sampling(NamedTuple):
    """The part of the estimate that only landmarks decide."""

    omega: Tensor
    """(batch, heads, samples, d)."""
    query_proposal: Tensor
    """What queries are multiplied with, likewise."""
    shared: Tensor
    """-log p_c: (batch, heads, samples, 1)."""
    opt: OptWeights | None
    """None unless the weights are opt."""


@register("lara")
class LARA(AttentionMixer[LARAConfig]):
    capabilities = Capabilities(causal=False, cross=False, grid=True, state="none", averages=True)
    tuned: ClassVar = {"landmarks": Choices((16, 25, 49, 64))}
    published: ClassVar = {
        "imagenet": {"landmarks": 49, "proposal": "pool", "landmark_mixing": "keys", "weights": "opt", "alpha": 2.0},
        "wmt14": {"landmarks": 16, "proposal": "adaptive", "weights": "opt"},
    }
    examples = (
        {"landmarks": 4},
        {"landmarks": 5, "proposal": "adaptive", "alpha": 2.0},
        {"landmarks": 4, "weights": "bh", "landmark_mixing": "keys", "pool_proj": "dense"},
        {"landmarks": 4, "rotary": True},
        {"landmarks": 9, "weights": "biased", "proposal": "plain-pool", "landmark_mixing": "values"},
    )

    def setup(self) -> None:
        super().setup()
        self.q_map: HeadMap | None = None
        self.k_map: HeadMap | None = None
        if self.config.proposal != "plain-pool":
            width = self.config.dim if self.config.pool_proj == "dense" else self.config.head_width
            self.q_map, self.k_map = HeadMap(width), HeadMap(width)
        self.apply(init_small)

    def sees_grid(self, grid: tuple[int, int]) -> bool:  # noqa: ARG002
        return self.config.proposal != "adaptive"

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        x = cast_once(x)
        flat = self.projections(x)
        q_bar, k_bar, mask = self._landmarks(x, flat, layout)
        with full_precision(x):
            sampling = self._sampling(_contiguous_float32(q_bar), _contiguous_float32(k_bar), mask)
            by_head = flat.unflatten(-1, (3, self.config.heads, -1))
            w = sampling.omega, sampling.query_proposal
            y = landmark_attention(by_head, *w, sampling.shared, sampling.opt, layout.mask)
        return self.project_out(y.to(flat.dtype)), None

    # ------------------------------------------------------------------ landmarks

    def _landmarks(self, x: Tensor, flat: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
        """q~, k~: (batch, heads, c, d), and which of them exist in each row: (batch, c) bool, or None for all.

        Means of queries are queries of mean tokens, which are fewer. flat: projections (batch, time, 3 C).
        """
        config = self.config
        member = self._members(x, layout)
        # traced code has room for the landmarks of any length
        some_are_empty = layout.mask is not None or (config.landmarks is None and tracing.is_symbolic(x.shape[1]))
        mask = member.any(-1) if some_are_empty else None
        if config.proposal == "adaptive":
            assert self.q_map is not None
            assert self.k_map is not None
            q, k, _ = self.split_heads(flat)
            mapped = torch.stack([self.q_map(q), self.k_map(k)], 1)
            q_bar, k_bar = means(member[:, None, None], mapped).unbind(1)
            return q_bar, k_bar, mask
        if config.rotary:  # what is turned by positions has means of its own
            landmarks = self.split_heads(means(member, flat))
        else:
            count = config.num_landmarks(x.shape[1]) if tracing.may_branch_on_length() else 0
            even = layout == Layout() and count > 0 and x.shape[1] % count == 0
            landmarks = self.project(x.unflatten(1, (count, -1)).mean(2) if even else means(member, x))
        q_bar, k_bar, v_bar = (self._only(mask, part) for part in landmarks)
        if layout.grid is None:
            return q_bar, k_bar, mask
        if config.proposal == "pool":
            q_bar, k_bar = self._map_pooled(self.q_map, q_bar), self._map_pooled(self.k_map, k_bar)
        if config.landmark_mixing != "none":
            bias = (v_bar.norm(dim=-1) + 1e-4).log().unsqueeze(-2) if config.landmark_mixing == "values" else None
            k_bar = self._mix_keys(k_bar, bias, mask)
        return q_bar, k_bar, mask

    def _members(self, x: Tensor, layout: Layout) -> Tensor:
        """Which tokens each landmark stands for: (batch or 1, c, N) bool."""
        time, given = x.shape[1], self.config.landmarks
        is_symbolic = tracing.is_symbolic(time)
        if layout.grid is not None:
            member = grid_cells(layout.grid, math.isqrt(given or MOST_LANDMARKS), x.device)
        elif not is_symbolic and time <= (given or LEAST_LANDMARKS):  # segments of one token each
            member = torch.eye(time, dtype=torch.bool, device=x.device)[None]
        elif layout.mask is None and not is_symbolic:
            count = self.config.num_landmarks(time)
            member = segments(time, time, count, x.device, count)
        elif given is not None:
            member = segments(layout.lengths_of(x), time, given, x.device, given)
        else:
            lengths = layout.lengths_of(x)
            counts = (lengths // TOKENS_PER_LANDMARK).clamp(LEAST_LANDMARKS, MOST_LANDMARKS)
            most = MOST_LANDMARKS if is_symbolic else self.config.num_landmarks(time)
            member = segments(lengths, time, counts[:, None], x.device, most)
        return member if layout.mask is None else member & layout.mask[:, None, :]

    @staticmethod
    def _only(mask: Tensor | None, landmarks: Tensor) -> Tensor:
        """Zeros for landmarks (batch, heads, c, d) that stand for nothing, where projections have their biases."""
        return landmarks if mask is None else landmarks.masked_fill(~mask[:, None, :, None], 0)

    def _map_pooled(self, linear_norm: HeadMap | None, pooled: Tensor) -> Tensor:
        assert linear_norm is not None
        if self.config.pool_proj == "light":
            return linear_norm(pooled)
        return linear_norm(pooled.transpose(1, 2).flatten(2)).unflatten(-1, (self.config.heads, -1)).transpose(1, 2)

    def _mix_keys(self, k_bar: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        logits = at_least_float32(self.scale * k_bar @ k_bar.transpose(-1, -2))
        if bias is not None:
            logits = logits + bias
        if mask is not None:
            logits = keep(logits, mask[:, None, None, :])
        return logits.softmax(-1).to(k_bar.dtype) @ k_bar

    # ------------------------------------------------------------------ importance sampling

    def _samples(self, mu: Tensor) -> tuple[Tensor, int]:
        """omega (batch, heads, c or 2c, d), and how often each landmark was sampled."""
        if not self.training:
            return mu, 1
        if self.config.num_samples == "single":
            return mu + noise.normal(mu.shape, mu), 1
        twice = torch.cat([mu, mu], 2)
        if self.config.num_samples == "multi":
            return twice + noise.normal(twice.shape, mu), 2
        z = noise.normal(mu.shape, mu)
        return twice + torch.cat([z, -z], 2), 2

    def _sampling(self, q_bar: Tensor, k_bar: Tensor, mask: Tensor | None) -> Sampling:
        """What landmarks (batch, heads, c, d) say about the estimate, before any key or query is seen."""
        mu = q_bar + k_bar
        omega, times = self._samples(mu)
        if times > 1:
            q_bar, mu = q_bar.repeat(1, 1, times, 1), mu.repeat(1, 1, times, 1)
            mask = mask.repeat(1, times) if mask is not None else None
        density = kernel_logits(omega, mu, self.scale)
        total = (density if mask is None else keep(density, mask[:, None, None, :])).logsumexp(-1, keepdim=True)
        query_proposal, opt = omega, None
        if self.config.weights == "biased":
            query_proposal = omega + mu
        if self.config.weights != "opt":
            shared = -total
        else:
            own = density.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            shared = -own
            if mask is None:
                mean_weights = own.new_full((1, own.shape[2]), 1 / own.shape[2])
            else:
                mean_weights = mask.to(own.dtype) / mask.sum(-1, keepdim=True)
            opt = OptWeights(q_bar, (own - total).exp(), mean_weights, self.config.alpha)
        if mask is not None:
            shared = keep(shared, mask[:, None, :, None])
        return Sampling(omega, query_proposal, shared, opt)


def _contiguous_float32(x: Tensor) -> Tensor:
    """`at_least_float32`; what is converted is laid out as batched products want it, which saves them a copy."""
    is_wide = x.dtype in (torch.float32, torch.float64)
    return x if is_wide else x.to(torch.float32, memory_format=torch.contiguous_format)


def means(member: Tensor, x: Tensor) -> Tensor:
    """Means of vectors (..., N, d) over the members (..., c, N) of each landmark: (..., c, d)."""
    return member.to(x.dtype) / member.sum(-1, keepdim=True).clamp(min=1) @ x


def segments(lengths: Tensor | int, time: int, count: int | Tensor, device: torch.device, most: int) -> Tensor:
    """Members of `count` segments of each row: (batch, count, time) bool. lengths: (batch,), or that of one row.

    With a = floor(length / count), the first (a + 1) count - length segments have a tokens and the others a + 1.
    count: one number, or (batch, 1) one for each row, none larger than `most`.
    """
    short: Tensor | int
    least: Tensor | int
    if isinstance(lengths, int):  # known without asking the device, and in half as many operations
        short = lengths // count
        least = max(1, short)
    else:
        lengths = lengths[:, None]
        short = lengths // count
        least = short.clamp(min=1)
    number_short = (short + 1) * count - lengths
    position = torch.arange(time, device=device)
    late = position - number_short * short
    segment = torch.where(late < 0, position // least, number_short + late // (short + 1))
    return segment.view(-1, 1, time) == torch.arange(most, device=device)[:, None]


def grid_cells(grid: tuple[int, int], side: int, device: torch.device) -> Tensor:
    """Members of side x side pooling cells, row by row: (1, side^2, H W) bool. Cells of uneven grids overlap."""

    def axis(cells: int) -> Tensor:
        low = torch.arange(side, device=device)[:, None]
        position = torch.arange(cells, device=device)
        return (position >= low * cells // side) & (position < -(-(low + 1) * cells // side))

    rows, columns = axis(grid[0]), axis(grid[1])
    return (rows[:, None, :, None] & columns[None, :, None, :]).reshape(1, side * side, -1)
