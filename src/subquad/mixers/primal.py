"""Primal attention: kernel SVD of an asymmetric attention kernel in its primal form; no values, no attention matrix.

Equation:
    phi(u) = u / max(|u|, 1e-12)                                      per head and token
    e_t = phi(q_t) We',   r_t = phi(k_t) Wr'                          We', Wr' (d, s) per head
    y = Linear_out(heads of Linear_join([e ; r]))
    causal:    q_t, k_t are sums over the positions up to t;  We' = We, Wr' = Wr (H, d, s) are learned
    otherwise: We'[h] = X_h[samples]^T We[h], likewise Wr';  X_h (N, d) the channels of x that belong to head h,
               samples L positions spread evenly over each row's own tokens, We, Wr (H, L, s) learned
    aux = J^2,  J = 1/(2HN) sum_{h,t,j} (lam_hj e_thj)^2 + (lam_hj r_thj)^2  -  1/H sum_h Tr(We[h]^T Wr[h])
    J vanishes where We, Wr are the singular vectors of the kernel; a task adds a multiple of aux to its loss.

Cost: O(T C^2) for the projections and O(T C s) for the scores; memory O(T (C + H s)).
Streaming (causal) keeps the running sums of q and k: O(1).

Citation: Chen et al., "Primal-Attention: self-attention through asymmetric kernel SVD in primal representation",
NeurIPS 2023.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Choices, Scale
from subquad.kernels.dropout import dropout
from subquad.kernels.precision import at_least_float32, full_precision, is_autocast
from subquad.kernels.primal_scores import primal_scores
from subquad.kernels.primal_scores.reference import projected
from subquad.kernels.tokens_at import tokens_at
from subquad.mixers.attention import init_xavier
from subquad.mixers.base import Capabilities, Mixer, MixerConfig
from subquad.mixers.layout import Layout, right_padded
from subquad.mixers.registry import register
from subquad.mixers.state import State, advanced, fresh_lengths


class PrimalConfig(MixerConfig):
    rank: int = Field(30, ge=1, description="s, number of singular vectors on each side")
    rank_multiple: int = Field(10, ge=1, description="positions sampled per unit of rank (not causal)")
    max_length: int = Field(
        512,
        ge=1,
        description="L = min(max_length, rank * rank_multiple) positions are sampled, at any length (not causal)",
    )
    reduction: Literal["sample", "batch"] = Field(
        "sample",
        description="regulariser: square J of each sample, or the batch mean of J (then the same for all samples)",
    )
    trace: Literal["weights", "data"] = Field(
        "weights",
        description="trace term of J: learned We, Wr, or We', Wr' made of the sampled tokens (causal: the same)",
    )
    qk_bias: bool = Field(True, description="bias of the query and key projections")

    @property
    def samples(self) -> int:
        return min(self.max_length, self.rank * self.rank_multiple)


@dataclass
class PrimalState(State):
    """q, k: (batch, heads, d), sums over the tokens read, in float32 at least."""

    q: Tensor
    k: Tensor


class PrimalScores(NamedTuple):
    """both: e and then r (batch, time, heads, 2 s); squares: the mean of e^2 + r^2 over the tokens of each row (batch,
    heads, s); we, wr: the (.., heads, d, s) that were projected on."""

    both: Tensor
    squares: Tensor
    we: Tensor
    wr: Tensor

    @property
    def e(self) -> Tensor:
        """(batch, heads, time, s)."""
        return self.both.transpose(1, 2).chunk(2, -1)[0]

    @property
    def r(self) -> Tensor:
        """(batch, heads, time, s)."""
        return self.both.transpose(1, 2).chunk(2, -1)[1]


@register("primal")
class Primal(Mixer[PrimalConfig]):
    capabilities = Capabilities(causal=True, cross=False, grid=False, state="running sums, O(1)")
    tuned: ClassVar = {"rank": Scale(0.5, 2), "train.aux_weight": Choices((0.0, 1e-4, 1e-2))}
    state_type = PrimalState
    # the original adds 0.1 times the regulariser to the summed loss of 2,048 tokens; ours counts for each token
    published: ClassVar = {"wikitext103": {"rank": 30, "train.aux_weight": 0.1 / 2048}}
    examples = (
        {},
        {"rank": 3, "rank_multiple": 2, "qk_bias": False},
        {"rank": 4, "max_length": 9, "reduction": "batch"},
        {"rank": 2, "rank_multiple": 3, "trace": "data"},
        {"rank": 1, "max_length": 1},
    )

    def setup(self) -> None:
        config = self.config
        dim, heads = config.dim, config.heads
        rows = dim // heads if config.causal else config.samples
        self.qk = nn.Linear(dim, 2 * dim, bias=config.qk_bias)
        self.we = nn.Parameter(torch.empty(heads, rows, config.rank))
        self.wr = nn.Parameter(torch.empty(heads, rows, config.rank))
        self.lam = nn.Parameter(torch.rand(heads, config.rank))
        self.join = nn.Linear(2 * config.rank, dim // heads)
        self.out = nn.Linear(dim, dim)
        init_xavier(self.qk)
        for part in self.qk.weight.split(dim):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.orthogonal_(self.we)  # the flattened heads are orthonormal to each other, not the columns within one
        nn.init.orthogonal_(self.wr)
        init_xavier(self.out)

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        scores = self.scores(x, layout)
        return self._merge(scores.both), self._regulariser(scores)

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> PrimalState:
        width = self.config.dim // self.config.heads
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        zeros = torch.zeros(batch, self.config.heads, width, device=device, dtype=kept)
        return PrimalState(fresh_lengths(batch, device), zeros, zeros)

    def step(self, x: Tensor, new: Tensor | None, state: PrimalState) -> tuple[Tensor, PrimalState]:
        # q of all heads, then k of all heads: (batch, 2 heads, time, d)
        qk = at_least_float32(self.qk(x)).unflatten(-1, (2 * self.config.heads, -1)).transpose(1, 2)
        if new is not None:
            qk = qk.masked_fill(right_padded(new, x.shape[1]).logical_not()[:, None, :, None], 0)
        with full_precision(x):
            qk = torch.cat([state.q, state.k], 1)[:, :, None] + qk.cumsum(2)
            weights = torch.cat([at_least_float32(self.we), at_least_float32(self.wr)])
            e, r = projected(qk, weights).transpose(1, 2).chunk(2, 2)
        last = qk[:, :, -1].clone().chunk(2, 1)  # a copy: the chunk may be long
        return self._merge(torch.cat([e, r], -1)), PrimalState(advanced(state.lengths, new, x.shape[1]), *last)

    def scores(self, x: Tensor, layout: Layout) -> PrimalScores:
        """The projection scores e, r of every token of x (batch, time, C)."""
        we, wr = at_least_float32(self.we), at_least_float32(self.wr)
        if self.config.causal:
            weights = torch.stack([we, wr])[None]
        else:
            x, sampled = tokens_at(x, sample_positions(layout.lengths_of(x), self.config.samples))
            tokens = at_least_float32(sampled).unflatten(-1, (self.config.heads, -1)).permute(0, 2, 3, 1)
            with full_precision(x):
                we, wr = (tokens @ torch.cat([we, wr], -1)).chunk(2, -1)
            weights = torch.stack([we, wr], 1)
        lengths = None if layout.padding is None else layout.lengths
        qk = self.qk(x).unflatten(-1, (2, self.config.heads, -1))
        return PrimalScores(*primal_scores(qk, weights, lengths, causal=self.config.causal), we, wr)

    def _merge(self, both: Tensor) -> Tensor:
        """(batch, time, C): scores joined per head, heads side by side, output projection, dropout."""
        if not is_autocast(both.device):  # which casts by itself
            both = both.to(self.join.weight.dtype)
        y = self.out(self.join(both).flatten(2))
        return dropout(y, self.config.dropout, self.training)

    def _regulariser(self, scores: PrimalScores) -> Tensor:
        """J^2 of every sample, (batch,), means running over each row's own tokens."""
        heads, batch = self.config.heads, scores.both.shape[0]
        with full_precision(scores.squares):
            energy = (at_least_float32(self.lam).square() * scores.squares).sum((1, 2))
            if self.config.trace == "weights":
                trace = (at_least_float32(self.we) * at_least_float32(self.wr)).sum()
            else:
                trace = (scores.we * scores.wr).sum((-3, -2, -1))
            balance = (energy / 2 - trace) / heads
            if self.config.reduction == "batch":
                balance = balance.mean().expand(batch)
            return balance.square()


def sample_positions(lengths: Tensor, count: int) -> Tensor:
    """`count` positions spread evenly from the first to the last token of each row: (batch,) -> (batch, count) int64.

    The rule is that of torch.linspace(0, length - 1, count, dtype=torch.int64), which counts from the nearer end and
    truncates in float64. Rows shorter than `count` repeat positions.
    """
    if count == 1:
        return torch.zeros_like(lengths)[:, None]
    last = (lengths[:, None] - 1).double()
    step = last / (count - 1)
    index = torch.arange(count, device=lengths.device)
    return torch.where(index < count // 2, step * index, last - step * (count - 1 - index)).long()
