"""Mixers to test: every mechanism with every option set of its `examples`, in every form that it has.

A case is one mechanism, one option set and one form (causal or bidirectional). Its name, such as
`eva-causal-window4-chunk_size2-relative.t5-overlap`, is what pytest shows and what `pytest -k` selects by.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from subquad.mixers import Mixer, available, build, mixer_class

DIM, HEADS = 16, 4


@dataclass(frozen=True)
class Case:
    """A mechanism with options, in one form."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    causal: bool = False

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], causal: bool = False) -> "Case":
        return cls(name, tuple(options.items()), causal)

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Mixer:
        """The mixer in evaluation mode, with weights that make mistakes show; `more` are options besides its own."""
        torch.manual_seed(seed)
        mixer = build(self.name, **{"dim": DIM, "heads": HEADS, "causal": self.causal} | dict(self.options) | more)
        enlarge(mixer)
        return mixer.to(dtype).eval()

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its mechanism and form: for tests that take too long to run for all."""
        return self == first_case(self.name, self.causal)

    @property
    def dim(self) -> int:
        return dict(self.options).get("dim", DIM)

    @property
    def seed(self) -> int:
        """A seed of its own, so that different cases meet different shapes and values."""
        return zlib.crc32(str(self).encode()) % 2**16

    def tokens(self, batch: int, time: int, seed: int = 0) -> Tensor:
        """Random inputs (batch, time, channels)."""
        return tokens(batch, time, self.seed + seed, self.dim)

    def __str__(self) -> str:
        words = [self.name, *(["causal"] if self.causal else []), *(_word(*option) for option in self.options)]
        return "-".join(words if self.options else [*words, "defaults"])


def _word(option: str, value: Any) -> str:
    """An option in the name of a case, without signs that `pytest -k` cannot read."""
    if isinstance(value, bool):
        return option if value else f"no_{option}"
    return f"{option}{value}" if isinstance(value, int | float) else f"{option}.{value}"


def enlarge(mixer: nn.Module) -> None:
    """Weights far from their small initial values, so that mixing is far from uniform and biases are exercised."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


def tokens(batch: int, time: int, seed: int, dim: int = DIM) -> Tensor:
    """Normal values (batch, time, dim)."""
    return torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- which cases there are


@cache
def cases(name: str) -> tuple[Case, ...]:
    """All cases of a mechanism: bidirectional ones first. An option set that one form refuses has the other only.

    Raises ValueError when a form that the mechanism has is refused by all examples, or an example in all forms.
    """
    has = mixer_class(name).capabilities
    forms = [causal for causal, possible in ((False, has.bidirectional), (True, has.causal)) if possible]
    asked = [Case.of(name, options, causal) for causal in forms for options in mixer_class(name).examples]
    refused = {case: reason for case in asked if (reason := refusal(case)) is not None}
    for group in [
        *([case for case in asked if case.causal == causal] for causal in forms),
        *([case for case in asked if dict(case.options) == options] for options in mixer_class(name).examples),
    ]:
        if all(case in refused for case in group):
            raise ValueError(f"no example of {name} tests what it should: {group[0]} is refused: {refused[group[0]]}")
    return tuple(case for case in asked if case not in refused)


def refusal(case: Case) -> str | None:
    """Why the options of a case do not go with its form; None when they do."""
    try:
        case.build()
    except ValueError as error:
        return str(error)
    return None


def first_case(name: str, causal: bool | None = None) -> Case:
    """The first case of a mechanism in the given form; None: in the form that comes first."""
    return next(case for case in cases(name) if causal in (None, case.causal))


def every_case(*names: str) -> list[Case]:
    """The cases of the mechanisms, or of all that are registered."""
    return [case for name in names or available() for case in cases(name)]


def is_causal(case: Case) -> bool:
    return case.causal


@cache
def has_parameters(case: Case) -> bool:
    return next(case.build().parameters(), None) is not None


@cache
def streams(case: Case) -> bool:
    return case.causal and case.build().can_stream


@cache
def reads_context(case: Case) -> bool:
    return case.build().why_no_cross() is None


@cache
def grid_options(case: Case) -> dict[str, Any] | None:
    """What a case needs besides its options to see a grid as one; None when it reads grids row by row.

    A mechanism with the option `dims` may have weights for sequences by default: dims=2 asks for those for grids.
    """
    mixer = case.build()
    if case.causal or not mixer.capabilities.grid:
        return None
    try:
        return {} if mixer.sees_grid((2, 2)) else None
    except ValueError:
        return {"dims": 2} if "dims" in mixer.Config.model_fields else None


def sees_grids(case: Case) -> bool:
    """Whether neighbourhoods become two-dimensional when a grid is given."""
    return grid_options(case) is not None


def reads_grids_row_by_row(case: Case) -> bool:
    """Whether a grid is a sequence to it. A causal mechanism that sees grids refuses them instead."""
    return not sees_grids(case) and not (case.causal and mixer_class(case.name).capabilities.grid)


@cache
def keeps_linear_memory(case: Case) -> bool:
    return case.build().keeps_linear_memory()


@cache
def averages_values(case: Case) -> bool:
    return case.build().averages_values()
