"""Linear attention: keys and queries meet through features, so that sums over keys are taken once.

Equation:
    y_i = sum_j phi(q_i).phi(k_j) v_j / max(sum_j phi(q_i).phi(k_j), n)             per head; causal: j <= i

favorp (the default) takes phi(t) = m^(-1/2) exp(W t' - |t'|^2 / 2 - M) + 1e-4 with t' = t d^(-1/4) and random W (m, d),
so that phi(q).phi(k) estimates exp(q.k / sqrt(d)), as long as the exponentials are large beside 1e-4. M is the largest
W t' of the query itself, and for keys that of all keys the query sees. The other maps are in `features.py`. Sums below
n = `smallest_normaliser` leave less of the values; M makes them the smaller, the more features there are. `cosine`
multiplies phi(q_i).phi(k_j) by cos(theta_i - theta_j), theta_i = (pi / 2) i / N, N the token count or `max_length`.

Cost: O(T m C) time, O(T (h m + C)) memory. Streaming keeps the sums over keys: O(m C) per token.
The causal form works on blocks of at most 64 positions. Because M grows along the sequence, what was summed before is
scaled down by exp(M_old - M_new) <= 1 and never up: nothing overflows, and no position knows of later ones. Maxima are
constants for the gradient.

Citation: Choromanski et al., "Rethinking attention with performers", ICLR 2021; cosine: Qin et al., "cosFormer:
rethinking softmax in attention", ICLR 2022; dpfp: Schlag et al., "Linear transformers are secretly fast weight
programmers", ICML 2021.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Scale
from subquad.kernels import tracing
from subquad.kernels.feature_attention import feature_attention
from subquad.kernels.feature_attention.reference import Sums, read_sums, sum_keys
from subquad.kernels.masking import MASK_VALUE
from subquad.kernels.precision import at_least_float32, full_precision
from subquad.kernels.scan import causal_sums, running_maximum
from subquad.mixers import noise
from subquad.mixers.attention import AttentionConfig, AttentionMixer
from subquad.mixers.base import Capabilities
from subquad.mixers.features import FEATURE_MAPS, Features, PositiveExponential, Projection, Reference, Scheme
from subquad.mixers.layout import Layout, right_padded
from subquad.mixers.registry import register
from subquad.mixers.state import CrossState, State, advanced, fresh_lengths

CosSin = tuple[Tensor, Tensor] | None
"""Cosine and sine of theta, each (batch or 1, 1, time, 1); None without cosine weighting."""


class PerformerConfig(AttentionConfig):
    features: int = Field(64, ge=1, description="number m of features of a head")
    feature_map: Literal["favorp", "relu", "fourier", "dpfp", "mlp-fourier", "relu-only", "sigmoid-only"] = Field(
        "favorp", description="from a query or key to its features"
    )
    projection: Scheme = Field(
        "redrawn", description="the random matrix: drawn anew in each training step, kept as built, or learned"
    )
    smallest_normaliser: float = Field(
        1e-2,
        gt=0,
        description="the least that weighted sums are divided by; a smaller one, such as 1e-6, keeps the size of "
        "values where weights are small, as in the place of trained softmax attention",
    )
    cosine: bool = Field(False, description="weights pairs by the cosine of their distance, a quarter turn in all")
    max_length: int | None = Field(
        None,
        ge=1,
        description="length of the quarter turn of `cosine`; default: each sequence's own, which causal lacks",
    )

    def check(self) -> None:
        super().check()
        if self.feature_map == "dpfp" and self.features < 2 * self.head_width:
            raise ValueError(f"feature_map 'dpfp' needs features >= {2 * self.head_width}, twice the width of a head")
        if self.feature_map == "mlp-fourier" and self.features % 2:
            raise ValueError(f"feature_map 'mlp-fourier' needs an even number of features (got {self.features})")
        if self.causal and self.cosine and self.max_length is None:
            raise ValueError("cosine=True with causal=True needs max_length, since the final length is not known")


@dataclass
class PerformerState(State):
    """Sums over the keys read. Values carry a 1 as their last channel, so that sums of features come along.

    sums: (batch, heads, width, d + 1), features relative to key_log_scale; eps_sums: (batch, heads, 1, d + 1), or 2
    with cosine, the values alone, for the constant in features; key_log_scale and query_log_scale: (batch, heads), the
    largest so far.
    """

    sums: Tensor
    eps_sums: Tensor
    key_log_scale: Tensor
    query_log_scale: Tensor


@dataclass
class PerformerContext(CrossState):
    """sums, counts: those of `Sums`; matrix: (batch, heads, m, d), the W of these sums, the same in every row."""

    sums: Tensor
    counts: Tensor
    matrix: Tensor | None


@register("performer")
class Performer(AttentionMixer[PerformerConfig]):
    capabilities = Capabilities(causal=True, cross=True, grid=False, state="sums, O(1)", averages=True)
    tuned: ClassVar = {"features": Scale(0.5, 2)}
    state_type, context_type = PerformerState, PerformerContext
    published: ClassVar = {"imagenet": {"feature_map": "favorp", "features": 64}}
    examples = (
        {"features": 8},
        {"features": 8, "smallest_normaliser": 1e-6},
        {"features": 6, "feature_map": "relu", "projection": "learnable"},
        {"features": 16, "feature_map": "fourier", "projection": "fixed"},
        {"features": 16, "feature_map": "dpfp"},
        {"features": 8, "feature_map": "mlp-fourier", "qkv_bias": False},
        {"feature_map": "relu-only"},
        {"feature_map": "sigmoid-only"},
        {"features": 8, "cosine": True, "max_length": 512},
        {"features": 8, "rotary": True},
    )

    def setup(self) -> None:
        super().setup()
        config = self.config
        sizes = config.heads, config.features, config.head_width
        self.feature_map = FEATURE_MAPS[config.feature_map](*sizes)
        self.projection = Projection(*sizes, config.projection) if self.feature_map.projected else None

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        self._check_length(x.shape[1] if layout.mask is None else layout.lengths_of(x), x.shape[1])
        matrix = self.projection() if self.projection is not None else None
        if isinstance(self.feature_map, PositiveExponential) and not self.config.cosine:
            assert matrix is not None
            return self.project_out(self._attend(self.projections(x), matrix, layout.mask)), None
        lengths = layout.lengths_of(x)
        if self.config.causal:
            fresh = self.new_state(x.shape[0], x.device, x.dtype)
            return self._advance(x, lengths if layout.mask is not None else None, fresh, matrix)[0], None
        q, k, v = (at_least_float32(t) for t in self.project(x))
        with full_precision(x):
            cos_sin = self._cos_sin(torch.arange(x.shape[1], device=x.device)[None], lengths, q.dtype)
            sums = self._summed(k, v, matrix, layout.mask, cos_sin)
            y = self._read(q, matrix, lambda log_scale: _largest(_only(log_scale, layout.mask)), sums, cos_sin)
        return self.merge_heads(y), None

    def _attend(self, flat: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
        """The whole attention with favorp, of projections (batch, time, 3 C): (batch, time, heads, d)."""
        matrix = matrix.to(torch.promote_types(flat.dtype, torch.float32))
        settings = self.feature_map.eps, self.config.smallest_normaliser
        return feature_attention(
            self.by_head(flat), matrix, mask, *settings, causal=self.config.causal, constant=noise.constant
        )

    def averages_values(self) -> bool:
        return self.config.feature_map not in ("relu", "dpfp")  # few such weights may sum to less than the normaliser

    # ------------------------------------------------------------------ cross-attention

    def why_no_cross(self) -> str | None:
        if self.config.cosine:
            return (
                "performer with cosine=True cannot read a context: cosines compare positions of one sequence; build it "
                "with cosine=False"
            )
        return super().why_no_cross()

    def encode_context(self, context: Tensor, layout: Layout) -> PerformerContext:
        matrix = self.projection() if self.projection is not None else None
        k, v = (at_least_float32(t) for t in self.project_part(context, 1, 3))
        with full_precision(context):
            values, counts = self._summed(k, v, matrix, layout.mask, None)
        kept = matrix.expand(context.shape[0], -1, -1, -1) if matrix is not None else None
        return PerformerContext(layout.lengths_of(context), values, counts, kept)

    def attend_context(self, x: Tensor, memory: PerformerContext) -> Tensor:
        q = at_least_float32(self.project_part(x, 0, 1)[0])
        with full_precision(x):
            # the first row as a sum of at most one row: an empty batch has none
            matrix = memory.matrix[:1].sum(0) if memory.matrix is not None else None
            y = self._read(q, matrix, noise.constant, Sums(memory.sums, memory.counts), None)
        return self.merge_heads(y)

    # ------------------------------------------------------------------ causal

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> PerformerState:
        dtype = torch.promote_types(dtype, torch.float32)
        heads, channels, turns = self.config.heads, self.config.head_width + 1, 2 if self.config.cosine else 1
        return PerformerState(
            fresh_lengths(batch, device),
            sums=torch.zeros(batch, heads, turns * self.feature_map.width, channels, device=device, dtype=dtype),
            eps_sums=torch.zeros(batch, heads, turns, channels, device=device, dtype=dtype),
            key_log_scale=torch.full((batch, heads), MASK_VALUE, device=device, dtype=dtype),
            query_log_scale=torch.full((batch, heads), MASK_VALUE, device=device, dtype=dtype),
        )

    def step(self, x: Tensor, new: Tensor | None, state: PerformerState) -> tuple[Tensor, PerformerState]:
        if x.device.type == "cpu":  # another device would be waited for at each token
            self._check_length(advanced(state.lengths, new, x.shape[1]))
        # A stream spans many calls, so it cannot live with a matrix that each call draws anew.
        return self._advance(x, new, state, self.projection.matrix if self.projection is not None else None)

    def _advance(
        self, x: Tensor, new: Tensor | None, state: PerformerState, matrix: Tensor | None
    ) -> tuple[Tensor, PerformerState]:
        """Reads x (batch, time, C), the first new[b] positions of row b being tokens, after what `state` has read."""
        q, k, v = self.project(x, state.lengths)
        q, k = at_least_float32(q), at_least_float32(k)
        with full_precision(x):
            mask = right_padded(new, x.shape[1]) if new is not None else None
            positions = state.lengths[:, None] + torch.arange(x.shape[1], device=x.device)
            cos_sin = self._cos_sin(positions, state.lengths, q.dtype)
            query, key = self._features(q, matrix, mask), self._features(k, matrix, mask)
            query_log_scale = _running_log_scale(query, state.query_log_scale)
            key_log_scale = _running_log_scale(key, state.key_log_scale)
            queries = self._query_values(query, query_log_scale)
            # The scale of what is not a token keeps it out only once a row has read one: hence the masks.
            keys = _relative(key, key_log_scale)
            if mask is not None:
                keys = keys * mask[:, None, :, None]
            sides = (_times_cos_sin(queries, cos_sin), _times_cos_sin(keys, cos_sin), v)
            mixed, sums = causal_sums(*sides, key_log_scale, state.sums, state.key_log_scale)
            eps_sums = state.eps_sums
            if self.feature_map.eps:
                values = _with_one(at_least_float32(v))
                if mask is not None:
                    values = values * mask[:, None, :, None]
                ones = _times_cos_sin(torch.ones_like(values[..., :1]), cos_sin)
                running = (ones[..., None] * values[..., None, :]).cumsum(2) + eps_sums[:, :, None]
                weights = _times_cos_sin(queries.sum(-1, keepdim=True) * self.feature_map.eps, cos_sin)
                mixed = mixed + (weights[..., None, :] @ running).squeeze(-2)
                eps_sums = running[:, :, -1]
            y = mixed[..., :-1] / mixed[..., -1:].clamp(min=self.config.smallest_normaliser)
        # Copies: a state must not keep alive what its last entries were cut from.
        last = (sums, eps_sums, key_log_scale[..., -1], query_log_scale[..., -1])
        lengths = advanced(state.lengths, new, x.shape[1])
        return self.merge_heads(y), PerformerState(lengths, *(t.clone() for t in last))

    # ------------------------------------------------------------------ features

    def _features(self, t: Tensor, matrix: Tensor | None, mask: Tensor | None) -> Features:
        """Features of t (batch, heads, time, d); what is not a token has a log_scale below all others."""
        values, log_scale = self.feature_map(t, matrix)
        return Features(values, _only(log_scale, mask))

    def _query_values(self, query: Features, reference: Tensor) -> Tensor:
        values = _relative(query, reference) if self.feature_map.shares_query_scale else query.values
        return values + self.feature_map.eps

    def _summed(self, k: Tensor, v: Tensor, matrix: Tensor | None, mask: Tensor | None, cos_sin: CosSin) -> Sums:
        """Sums over the tokens of each row."""
        eps = self.feature_map.eps
        keys = self.feature_map.scaled(k, matrix, lambda log_scale: _largest(_only(log_scale, mask)))
        if cos_sin is not None:
            keys, eps = _times_cos_sin(keys + eps, cos_sin), 0.0
        return sum_keys(keys, v, mask, eps)

    def _read(self, q: Tensor, matrix: Tensor | None, reference: Reference, sums: Sums, cos_sin: CosSin) -> Tensor:
        """phi(q_i) . sums, normalised: (batch, heads, time, d). `reference` is for maps that compare queries."""
        own = reference if self.feature_map.shares_query_scale else noise.constant
        eps = self.feature_map.eps
        queries = self.feature_map.scaled(q, matrix, own)
        if cos_sin is not None:
            queries, eps = _times_cos_sin(queries + eps, cos_sin), 0.0
        return read_sums(queries, sums, eps, self.config.smallest_normaliser)

    # ------------------------------------------------------------------ cosine weighting

    def _cos_sin(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> CosSin:
        """theta of positions (batch or 1, time); lengths (batch,) are those of the rows, used without max_length."""
        if not self.config.cosine:
            return None
        theta = positions.to(dtype) / (self.config.max_length or lengths[:, None]) * (math.pi / 2)
        theta = theta[:, None, :, None]
        return theta.cos(), theta.sin()

    def _check_length(self, lengths: Tensor | int, at_most: int | None = None) -> None:
        """Beyond max_length cosines would turn negative. Compiled code cannot look into tensors, only at ints.

        at_most: what lengths do not exceed, None: that is not known.
        """
        limit = self.config.max_length
        if not self.config.cosine or limit is None or (at_most is not None and at_most <= limit):
            return
        if isinstance(lengths, Tensor) and not (tracing.may_read_values(lengths) and lengths.numel()):
            return
        longest = int(lengths.max()) if isinstance(lengths, Tensor) else lengths
        if longest > limit:
            raise ValueError(
                f"performer: {longest} tokens are more than max_length={limit}; build it with a larger one"
            )


# ---------------------------------------------------------------------- small helpers


def _only(log_scale: Tensor, mask: Tensor | None) -> Tensor:
    """Log scales (batch, heads, time) with those of what is not a token below all others."""
    return log_scale if mask is None else log_scale.masked_fill(~mask[:, None], MASK_VALUE)


def _running_log_scale(tokens: Features, before: Tensor) -> Tensor:
    """The largest so far (batch, heads, time), from what was reached before (batch, heads)."""
    return torch.maximum(running_maximum(noise.constant(tokens.log_scale)), before[..., None])


def _largest(log_scale: Tensor) -> Tensor:
    return noise.constant(log_scale).amax(-1, keepdim=True)


def _relative(token: Features, reference: Tensor) -> Tensor:
    return token.values * (token.log_scale - reference).exp()[..., None]


def _times_cos_sin(phi: Tensor, cos_sin: CosSin) -> Tensor:
    """[phi cos theta | phi sin theta], whose products carry cos(theta_i - theta_j)."""
    return phi if cos_sin is None else torch.cat([phi * cos_sin[0], phi * cos_sin[1]], -1)


def _with_one(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)
