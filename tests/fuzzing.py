"""What fuzzing needs: values that nobody meant, data with such values in it, and the promise that all commands keep.

SUBQUAD_FUZZ multiplies the number of examples and makes them other ones at every call; `torture/fuzz.py` sets it.
"""

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from subquad.cli.main import run as command

FACTOR = int(os.environ.get("SUBQUAD_FUZZ", "1"))
HUGE = [2**31, 2**63, 10**30]
WORDS = [
    "",
    "\0",
    "\n",
    "nan",
    "../..",
    "/dev/null",
    "{}",
    "%s",
    "--help",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
    "🐈‍⬛",
    "é",
]


def fuzzed(examples: int) -> settings:
    """Settings of a fuzz test with so many examples in the normal suite."""
    return settings(
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def scalars() -> st.SearchStrategy[Any]:
    texts = st.sampled_from(WORDS) | st.text(max_size=8)
    numbers = st.integers(-3, 40) | st.sampled_from([*HUGE, *(-value for value in HUGE)]) | st.floats(width=32)
    return st.none() | st.booleans() | numbers | texts


def junk() -> st.SearchStrategy[Any]:
    """Plain data of any shape."""
    keys = st.text(max_size=5) | st.integers(-2, 2) | st.none()
    return st.recursive(
        scalars(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
    )


@st.composite
def edited(draw: st.DrawFn, data: Any, values: st.SearchStrategy[Any] | None = None) -> Any:
    """The data with one to three places changed: another value, another name, one more entry, one fewer."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        _edit(draw, data, junk() if values is None else values)
    return data


def _edit(draw: st.DrawFn, data: Any, values: st.SearchStrategy[Any]) -> None:
    holder, key = data, None
    while isinstance(holder, dict | list) and holder:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw(st.sampled_from(keys))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
            break
        holder = inner
    if key is None:
        return
    action = draw(st.sampled_from(["replace", "replace", "remove", "rename", "copy"]))
    if action == "replace":
        holder[key] = draw(values)
    elif action == "remove":
        del holder[key]
    elif isinstance(holder, dict):
        value = holder.pop(key) if action == "rename" else holder[key]
        holder[draw(st.sampled_from([f"{key}x", "", "name", 7, None]))] = value


def kept_promise(call: Callable[[], Any]) -> Any:
    """The result of a call, or None where it refused its input: with a ValueError or OSError, and nothing else."""
    try:
        return call()
    except (ValueError, OSError) as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} says nothing") from error
        return None


def called(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, which ended well or with one clear line."""
    capsys.readouterr()
    code = command([str(word) for word in words])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2), err
    assert "Traceback" not in err
    assert "defect" not in err, err
    assert "out of memory" not in err, err
    if code:
        assert re.search(r"subquad: error: \S.*\n\Z", err), err
    return code, out, err
