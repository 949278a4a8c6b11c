"""Which cases a test of the contract runs for."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pytest

from subquad.testing.cases import Case, every_case

Test = TypeVar("Test", bound=Callable[..., None])


def for_cases(*conditions: Callable[[Case], bool]) -> Callable[[Test], Test]:
    """Decorates a test method with a parameter `case`: it runs for the cases that meet all conditions."""

    def mark(test: Test) -> Test:
        test.conditions = conditions  # type: ignore[attr-defined]
        return test

    return mark


class CaseTests:
    """Base of classes of tests that run once for each case of the mechanisms called `names`."""

    names: ClassVar[tuple[str, ...]]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        conditions = getattr(metafunc.function, "conditions", None)
        if conditions is not None:
            chosen = [case for case in every_case(*self.names) if all(holds(case) for holds in conditions)]
            metafunc.parametrize("case", [pytest.param(case, id=str(case)) for case in chosen])
