"""Mixers for tests: every mechanism with every option set of its `examples`, and weights that make mistakes show."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.mixers import Mixer, available, build, mixer_class

DIM, HEADS = 16, 4


@dataclass(frozen=True)
class Case:
    name: str
    number: int
    causal: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return mixer_class(self.name).examples[self.number]

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Mixer:
        torch.manual_seed(seed)
        mixer = build(self.name, **{"dim": DIM, "heads": HEADS, "causal": self.causal} | self.options | more)
        enlarge(mixer)
        return mixer.to(dtype).eval()

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}{'-causal' if self.causal else ''}[{options}]"


def enlarge(mixer: nn.Module) -> None:
    """Weights far from their small initial values, so that mixing is far from uniform and biases are exercised."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


def buildable(case: Case) -> bool:
    """Whether the options of an example allow the causal form (some are for one form only)."""
    try:
        case.build()
    except ValueError:
        return False
    return True


BIDIRECTIONAL = [Case(name, n) for name in available() for n in range(len(mixer_class(name).examples))]
CAUSAL = [
    case
    for name in available()
    if mixer_class(name).capabilities.causal
    for n in range(len(mixer_class(name).examples))
    if buildable(case := Case(name, n, causal=True))
]
EVERY = BIDIRECTIONAL + CAUSAL
STREAMING = [case for case in CAUSAL if case.build().why_no_streaming() is None]
CROSS = [case for case in BIDIRECTIONAL if case.build().why_no_cross() is None]
GRID = [case for case in BIDIRECTIONAL if mixer_class(case.name).capabilities.grid]


def tokens(batch: int, time: int, seed: int, dim: int = DIM) -> Tensor:
    return torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Equal within `tolerance`, relative to the largest value where that is above 1."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()))


def grid_options(case: Case) -> dict[str, Any]:
    """What an example needs besides its options to be built for grids: relative biases have another shape there."""
    return {"dims": 2} if "relative" in case.options else {}
