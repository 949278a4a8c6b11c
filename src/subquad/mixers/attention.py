"""What the mechanisms built on queries, keys and values share: projections into heads and back."""

import math
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.kernels.dropout import dropout
from subquad.kernels.precision import is_autocast
from subquad.mixers.base import Mixer, MixerConfig, MixerOutput
from subquad.mixers.layout import Padding
from subquad.mixers.state import State


class AttentionConfig(MixerConfig):
    """Options of every mechanism with queries, keys and values."""

    qkv_bias: bool = Field(True, description="bias of the query, key and value projections")
    rotary: bool = Field(
        False,
        description="rotate queries and keys by their positions, so that their products tell distances (not across a "
        "context); on a grid positions count row by row, in rows filled up to whole windows where there are windows",
    )

    @property
    def head_width(self) -> int:
        return self.dim // self.heads

    def check(self) -> None:
        super().check()
        self.check_rotary()

    def check_rotary(self) -> None:
        if self.rotary and self.head_width % 2:
            raise ValueError(f"rotary positions turn pairs of channels; a head of {self.head_width} has an odd number")


AttentionConfigT = TypeVar("AttentionConfigT", bound=AttentionConfig)


class AttentionMixer(Mixer[AttentionConfigT]):
    """Projects x to q, k, v of shape (batch, heads, time, d), and mixed heads back to (batch, time, C).

    One linear map holds [q | k | v], each `heads` contiguous groups of d channels.

    has_maps=False leaves out that map and the output map, for a layer that has its own: `mix_heads` then takes queries,
    keys and values as they are. What else the mechanism learns, such as EVA's maps of chunk means, it keeps.
    """

    reads_past_queries: ClassVar[bool] = False
    """Whether causal outputs depend on queries of earlier tokens, and not on their keys and values alone."""

    def __init__(self, config: AttentionConfigT | None = None, /, *, has_maps: bool = True, **options: Any) -> None:
        self.has_maps = has_maps
        super().__init__(config, **options)

    def setup(self) -> None:
        config = self.config
        self.scale = config.head_width**-0.5
        self.inner = config.heads * config.head_width
        self.out: nn.Module
        if self.has_maps:
            self.qkv = nn.Linear(config.dim, 3 * self.inner, bias=config.qkv_bias)
            self.out = self.output_map()
            self.apply(init_small)
        else:
            if config.rotary:
                raise ValueError(f"{self.name} without maps mixes queries and keys as they are: leave out rotary=True")
            self.out = nn.Identity()

    @property
    def has_adapter(self) -> bool:
        """Whether a module such as LoRA's took the place of the map. Its weight is only a part of what it computes."""
        return self.has_maps and not isinstance(self.qkv, nn.Linear)

    @property
    def input_width(self) -> int:
        """Without maps the mixer reads [q | k | v]."""
        return self.config.dim if self.has_maps else 3 * self.inner

    def mix_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        padding: Tensor | Padding | None = None,
        state: State | None = None,
    ) -> MixerOutput:
        """Mixes the heads of a layer with maps of its own: y (batch, heads, time, d), before its output map.

        q: (batch, heads, time, d). k, v: likewise, or with fewer heads, each of which serves as many neighbouring
        queries (grouped-query attention). All hold the same tokens; positions are in q and k already, if anywhere.
        scale: logits are scale * q.k, by default d^-1/2; another scale multiplies q and k by the same factor. padding
        and state: those of `forward`; a stream begins with `init_state(batch, q.device, q.dtype)`.
        """
        if self.has_maps:
            raise ValueError(f"{self.name} has maps of its own; build it with has_maps=False to mix given heads")
        if scale is not None and scale != self.scale:
            factor = math.sqrt(scale / self.scale)
            q, k = q * factor, k * factor
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = torch.stack([part.transpose(1, 2) for part in (q, k, v)], 2).flatten(2)
        mixed = self(x, padding=padding, state=state)
        y = mixed.y.to(x.dtype).unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
        return mixed._replace(y=y)

    def output_map(self) -> nn.Module:
        """From heads side by side (heads * d) to the model width."""
        return nn.Linear(self.inner, self.config.dim)

    def projections(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """[q | k | v] (batch, time, 3 C), q and k rotated where the config says so.

        start: (batch,) int64, tokens of each row before the first of x; None: x begins the sequence.
        """
        flat = self.qkv(x) if self.has_maps else x
        if not self.config.rotary:
            return flat
        number = torch.arange(x.shape[1], device=x.device)[None]
        q, k, v = flat.unflatten(-1, (3, self.config.heads, -1)).unbind(2)
        turned = rotated(torch.stack([q, k], 2), number if start is None else number + start[:, None])
        return torch.cat([turned, v[:, :, None]], 2).flatten(2)

    def project(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, each (batch, heads, time, d)."""
        return self.split_heads(self.projections(x, start))

    def why_no_cross(self) -> str | None:
        if self.config.rotary:
            return f"{self.name} with rotary=True cannot read a context: positions of two sequences have no distance"
        return super().why_no_cross()

    def by_head(self, flat: Tensor) -> Tensor:
        """[q | k | v] (batch, time, 3 C) -> (batch, time, 3, heads, d), as kernels take them."""
        return flat.unflatten(-1, (3, self.config.heads, -1))

    def split_heads(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[q | k | v] (batch, time, 3 C) -> q, k, v, each (batch, heads, time, d)."""
        # unbind before transpose: the gradient is then stacked in the layout that the projection's product wants
        q, k, v = (part.transpose(1, 2) for part in flat.unflatten(-1, (3, self.config.heads, -1)).unbind(2))
        return q, k, v

    def project_part(self, x: Tensor, first: int, last: int) -> list[Tensor]:
        """Some of q (0), k (1), v (2): parts first .. last - 1, each (batch, heads, time, d)."""
        rows = slice(first * self.inner, last * self.inner)
        if not self.has_maps:
            flat = x[..., rows]
        elif self.has_adapter:
            flat = self.qkv(x)[..., rows]
        else:
            bias = self.qkv.bias[rows] if self.qkv.bias is not None else None
            flat = F.linear(x, self.qkv.weight[rows], bias)
        parts = flat.unflatten(-1, (last - first, self.config.heads, -1)).unbind(2)
        return [part.transpose(1, 2) for part in parts]

    def merge_heads(self, heads: Tensor) -> Tensor:
        """(batch, heads, time, d) -> (batch, time, C): heads side by side, output projection, dropout."""
        return self.project_out(heads.transpose(1, 2))

    def project_out(self, heads: Tensor) -> Tensor:
        """The same for heads that are side by side already: (batch, time, heads, d) -> (batch, time, C)."""
        heads = heads.flatten(2)
        if not self.has_maps:
            return heads
        if not is_autocast(heads.device):  # which casts by itself, and would cast what was cast before
            heads = heads.to(self.qkv.weight.dtype)
        y = self.out(heads)
        return dropout(y, self.config.dropout, self.training)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """x (batch, time, ..., d) with channels i and i + d/2 turned by the angle p 10000^(-2i/d): rotary positions.

    position: (batch or 1, time). Products of two such vectors depend on the difference of their positions.
    """
    half = x.shape[-1] // 2
    rate = math.log(10000.0) / half
    frequency = torch.exp(torch.arange(half, device=x.device, dtype=torch.float32) * -rate)
    angle = (position.float()[..., None] * frequency).view(*position.shape, *(1,) * (x.dim() - 3), half)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.split(half, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def init_small(module: nn.Module) -> None:
    """Linear maps: truncated normal of deviation 0.02, biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-2, b=2)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def init_xavier(module: nn.Linear, gain: float = 1.0) -> None:
    """Xavier-uniform weights, zero biases."""
    nn.init.xavier_uniform_(module.weight, gain)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class HeadMap(nn.Module):
    """A linear map of head vectors, shared by all heads, with a layer norm or without: (..., d) -> (..., d)."""

    def __init__(self, width: int, norm: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def kernel_logits(w: Tensor, t: Tensor, scale: float) -> Tensor:
    """phi(w, t) = s w.t - s |t|^2 / 2, the log of a random feature: (..., c, d), (..., n, d) -> (..., c, n)."""
    return (scale * w) @ t.transpose(-1, -2) + (t.square().sum(-1) * (-scale / 2)).unsqueeze(-2)
