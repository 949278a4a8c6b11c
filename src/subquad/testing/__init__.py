"""The contract of a mixer as tests, for mechanisms of any package: one line in a test file runs them all.

    from subquad.testing import contract

    TestGatedMean = contract("gatedmean")

Every property of the contract is a test method, and runs once for each case: each option set of the mechanism's
`examples`, in each form that it has (bidirectional, causal). A failure is called, for example,
`TestGatedMean::test_padding_changes_nothing[gatedmean-causal-gate_bias1.0]`, so that `pytest -k gatedmean` and
`pytest -k padding` run what one expects. The package needs pytest.
"""

import pytest

from subquad.mixers import mixer_class

# so that failures show what was compared
for _module in [
    "compiling",
    "context",
    "gradients",
    "grids",
    "inputs",
    "padding",
    "precision",
    "refusals",
    "streaming",
]:
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from subquad.testing.cases import (  # noqa: E402
    DIM,
    HEADS,
    Case,
    cases,
    enlarge,
    every_case,
    first_case,
    reads_context,
    streams,
    tokens,
)
from subquad.testing.compiling import CompileContract  # noqa: E402
from subquad.testing.context import ContextContract  # noqa: E402
from subquad.testing.gradients import GradientContract  # noqa: E402
from subquad.testing.grids import GridContract  # noqa: E402
from subquad.testing.inputs import assert_close, close  # noqa: E402
from subquad.testing.padding import PaddingContract  # noqa: E402
from subquad.testing.precision import PrecisionContract  # noqa: E402
from subquad.testing.refusals import RefusalContract  # noqa: E402
from subquad.testing.selection import CaseTests  # noqa: E402
from subquad.testing.streaming import StreamingContract  # noqa: E402


class MixerContract(
    PaddingContract,
    GridContract,
    StreamingContract,
    ContextContract,
    GradientContract,
    PrecisionContract,
    RefusalContract,
    CompileContract,
    CaseTests,
):
    """All properties that every mechanism promises."""


def contract(*names: str) -> type[MixerContract]:
    """A class of tests that hold the mechanisms called `names` to the contract.

    Assign it to a name that begins with `Test` in a file that pytest collects.
    """
    if not names:
        raise ValueError("contract() needs the name of at least one mechanism")
    for name in names:
        mixer_class(name)
    return type("MixerContract", (MixerContract,), {"names": names})


__all__ = [
    "DIM",
    "HEADS",
    "Case",
    "MixerContract",
    "assert_close",
    "cases",
    "close",
    "contract",
    "enlarge",
    "every_case",
    "first_case",
    "reads_context",
    "streams",
    "tokens",
]
