"""The projections of a mechanism alone: the linear maps that no implementation of it can avoid.

A floor is built from the mixer's own modules, so that it has the same shapes by construction. What stands between two
maps in the mechanism is left out: the second map gets an input of its own, and every output a given gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.compare.measure.timing import Work
from subquad.mixers import Mixer

Floor = Callable[[Any, Tensor, Tensor], list[Tensor]]
"""(mixer, x, h) -> outputs; h stands for what the mechanism has before its last maps, see `inner`."""


def attention(mixer: Any, x: Tensor, h: Tensor) -> list[Tensor]:
    return [mixer.qkv(x), mixer.out(h)]


def lightconv(mixer: Any, x: Tensor, h: Tensor) -> list[Tensor]:
    return [F.glu(mixer.in_proj(x)), mixer.out_proj(h)]


def dynamicconv(mixer: Any, x: Tensor, h: Tensor) -> list[Tensor]:
    u = F.glu(mixer.in_proj(x))
    return [u, mixer.tap_map(u), mixer.out_proj(h)]


def linformer(mixer: Any, x: Tensor, h: Tensor) -> list[Tensor]:
    """Queries of all tokens, keys and values of the compressed ones (compress-first)."""
    width, weight, bias = mixer.inner, mixer.qkv.weight, mixer.qkv.bias
    q = F.linear(x, weight[:width], bias[:width])
    k = F.linear(mixer.compress_k @ x, weight[width : 2 * width], bias[width : 2 * width])
    v = F.linear(mixer.compress_v @ x, weight[2 * width :], bias[2 * width :])
    return [q, k, v, mixer.out(h)]


def primal(mixer: Any, x: Tensor, h: Tensor) -> list[Tensor]:
    """Queries and keys; the scores h (batch, time, heads, 2 s) joined in each head, and the output map of that."""
    return [mixer.qk(x), mixer.out(mixer.join(h).flatten(2))]


FLOORS: dict[str, Floor] = {
    "lightconv": lightconv,
    "dynamicconv": dynamicconv,
    "linformer": linformer,
    "primal": primal,
}


def inner(mixer: Any, x: Tensor) -> Tensor:
    """What the last maps get, instead of what the mechanism would compute: any values of that shape."""
    if mixer.name == "primal":
        return x.new_ones(*x.shape[:2], mixer.config.heads, mixer.join.in_features)
    return torch.ones_like(x)


def training_floor(mixer: Mixer, x: Tensor) -> Work:
    """Forward and backward of the mixer's projections for x (batch, time, channels): returns the gradients."""
    floor = FLOORS.get(mixer.name, attention)
    x, h = x.detach().requires_grad_(), inner(mixer, x).requires_grad_()
    with torch.no_grad():
        upstream = [torch.ones_like(output) for output in floor(mixer, x, h)]
    weights = _used(mixer)

    def work() -> list[Tensor | None]:
        return list(torch.autograd.grad(floor(mixer, x, h), [x, h, *weights], upstream, allow_unused=True))

    return work


def _used(mixer: Mixer) -> list[nn.Parameter]:
    return [parameter for parameter in mixer.parameters() if parameter.requires_grad]
