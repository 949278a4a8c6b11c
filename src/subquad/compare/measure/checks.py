"""What a mechanism must pass before a time of it is printed."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.mixers import Mixer
from subquad.mixers.noise import Kind, drawing_from, from_generator

LONGEST_CHECK = 256
"""The float64 copy and the stream read at most this many positions, to keep the check cheaper than what it guards."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed relative L2 distance, by the precision of the mixer, or that of autocast around it."""


class CheckFailedError(Exception):
    """The output of a mixer is wrong; the message says how."""


def check_mixer(mixer: Mixer, x: Tensor, grid: tuple[int, int] | None = None) -> dict[str, Any]:
    """Runs the mixer in eval mode on the beginning of x (batch, time, channels), or raises CheckFailedError.

    With a grid (height, width) of x, on all of x.

    Its output must have the shape of x, be finite, agree with a float64 copy on the CPU and, when the mixer streams,
    with a pass in chunks of 1, 2, 4, ... positions. Returns the distances.
    """
    mixer.eval()
    x = x[:, :LONGEST_CHECK] if grid is None else x
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    tolerance = TOLERANCE[torch.get_autocast_dtype(device) if autocast else x.dtype]
    draws = ReplayedDraws()
    with torch.no_grad():
        with drawing_from(draws.remember):
            y = mixer(x, grid=grid).y
        check_tensor("output", y, x.shape)
        with drawing_from(draws.repeat), torch.autocast("cpu", enabled=False):
            exact = copy.deepcopy(mixer).to("cpu", torch.float64)(x.to("cpu", torch.float64), grid=grid).y
        result = {"length": x.shape[1], "float64_distance": _distance("its float64 copy", y, exact, tolerance)}
        if mixer.config.causal and mixer.can_stream:
            result["streaming_distance"] = _distance("its streaming form", y, _streamed(mixer, x), tolerance)
    return result


def check_tensor(name: str, value: Tensor, shape: Sequence[int]) -> None:
    if value.shape != torch.Size(shape):
        raise CheckFailedError(f"the {name} has shape {tuple(value.shape)} instead of {tuple(shape)}")
    if not torch.isfinite(value).all():
        raise CheckFailedError(f"the {name} has values that are not finite")


def relative_distance(value: Tensor, target: Tensor) -> float:
    """||value - target|| / ||target||, in float64."""
    value, target = value.to("cpu", torch.float64), target.to("cpu", torch.float64)
    return ((value - target).norm() / target.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


class ReplayedDraws:
    """Gives a copy of a mixer the draws that the mixer itself made, in the copy's precision."""

    def __init__(self) -> None:
        self.draws: list[Tensor] = []

    def remember(self, kind: Kind, like: Tensor, shape: Sequence[int]) -> Tensor:
        self.draws.append(from_generator(kind, like, shape))
        return self.draws[-1]

    def repeat(self, kind: Kind, like: Tensor, shape: Sequence[int]) -> Tensor:
        draw = self.draws.pop(0)
        assert draw.shape == torch.Size(shape)
        return draw.to(like) if kind == "normal" else draw.to(like.device)


def _distance(what: str, value: Tensor, target: Tensor, tolerance: float) -> float:
    distance = relative_distance(value, target)
    if not distance <= tolerance:
        raise CheckFailedError(f"the output differs from {what} by {distance:.1e} (relative), allowed {tolerance:.0e}")
    return distance


def _streamed(mixer: Mixer, x: Tensor) -> Tensor:
    state, start, outputs = mixer.init_state(x.shape[0], x.device, x.dtype), 0, []
    while start < x.shape[1]:
        chunk = x[:, start : 2 * start + 1]
        y, state, _ = mixer(chunk, state=state)
        outputs.append(y)
        start += chunk.shape[1]
    return torch.cat(outputs, 1)
