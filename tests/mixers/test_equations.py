"""Docstring equations, executed literally, give what the modules give: for every mechanism, option set and form."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.mixers.equations_windows  # noqa: F401, it adds its equations to the others
from subquad.mixers import available, mixer_class, noise
from subquad.testing import Case, assert_close, cases, every_case
from subquad.testing.cases import grid_options
from tests.mixers.equations import EQUATIONS, NOISE, primal_scores

OURS = [name for name in available() if mixer_class(name).__module__.startswith("subquad.")]
RAGGED: list[dict[str, Any]] = [
    {"window": 4, "chunk_size": 3},
    {"window": 4, "chunk_size": 3, "overlap": True},
    {"window": 4, "chunk_size": 9, "overlap": True},
    {"window": 5, "landmarks": 4, "overlap": True},
    {"window": 6, "variant": "decoder", "landmarks": 4, "overlap": True},
    {"window": 3},
    {"window": 3, "overlap": True},
]
"""Options of eva whose chunks do not go into the windows, or are longer than the sequence, or follow its length."""
CASES = [*every_case(*OURS), *(Case.of("eva", options) for options in RAGGED)]
LENGTHS = (1, 2, 5, 12, 13)
GRIDS = ((1, 1), (3, 2), (4, 8), (5, 7))


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def small(case: Case, **more: Any) -> Any:
    return case.build(torch.float64, dim=8, heads=2, **more)


def tokens_of(case: Case, batch: int, count: int) -> Tensor:
    return case.tokens(batch, count)[..., :8].double()


def check(case: Case, mixer: Any, time: int) -> None:
    x = tokens_of(case, 2, time)
    expected = torch.stack([EQUATIONS[case.name](mixer, row, (time,)) for row in x])
    assert_close(mixer(x).y, expected, f"{time} tokens", 1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences(case: Case) -> None:
    mixer = small(case)
    for time in LENGTHS:
        check(case, mixer, time)


@pytest.mark.parametrize("case", [case for case in CASES if grid_options(case) is not None], ids=str)
def test_grids(case: Case) -> None:
    mixer = small(case, **(grid_options(case) or {}))
    for grid in GRIDS:
        x = tokens_of(case, 1, grid[0] * grid[1])
        assert_close(mixer(x, grid=grid).y[0], EQUATIONS[case.name](mixer, x[0], grid), f"a grid of {grid}", 1e-6)


def fixed_draw(kind: noise.Kind, like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.full(tuple(shape), NOISE, dtype=like.dtype) if kind == "normal" else like.argmin(-1)


@pytest.mark.parametrize("case", every_case("eva", "lara", "ra", "performer", "scatterbrain"), ids=str)
def test_draws_of_training(case: Case) -> None:
    """With one value in the place of every draw."""
    with noise.drawing_from(fixed_draw):
        check(case, small(case).train(), 13)


def test_keys_that_randomized_attention_draws() -> None:
    with noise.drawing_from(fixed_draw):
        case = Case.of("ra", {"proposal": "sampled"})
        check(case, small(case), 7)


@pytest.mark.parametrize("case", cases("primal"), ids=str)
def test_the_regulariser_of_primal(case: Case) -> None:
    mixer, x = small(case), tokens_of(case, 3, 13)
    J = torch.stack([primal_scores(mixer, row)[1] for row in x])
    if mixer.config.reduction == "batch":
        J = J.mean().expand(3)
    assert_close(mixer(x).aux, J**2, "J^2", 1e-6)


def test_every_mechanism_has_its_equation_typed_in() -> None:
    assert set(OURS) == set(EQUATIONS)
