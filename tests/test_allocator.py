"""Keeping freed memory: what it changes, who asks for it, and that nothing breaks where it cannot work."""

import ctypes
import subprocess
import sys
from functools import partial

import pytest

from subquad import allocator
from subquad.cli.main import run

WATCHED = """
import resource
import torch
from subquad.allocator import keep_freed_memory

kept = keep_freed_memory() if {keep} else False
for _ in range(3):
    block = torch.ones(16 * 2**20)  # 64 MB, more than glibc keeps by itself
    del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = torch.ones(16 * 2**20)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults < 1000)
"""

needs_glibc = pytest.mark.skipif(allocator._glibc() is None, reason="the allocator is not glibc's")


def watch(keep: bool) -> list[str]:
    """In a process of its own, whose allocator nobody has touched."""
    command = [sys.executable, "-c", WATCHED.format(keep=keep)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@needs_glibc
def test_freed_memory_is_used_again() -> None:
    kept, no_page_faults = watch(keep=True)
    if kept == "False":
        pytest.skip("this glibc refuses the thresholds")
    assert no_page_faults == "True"


@needs_glibc
def test_the_library_leaves_the_allocator_alone() -> None:
    assert watch(keep=False) == ["False", "False"]


def test_it_needs_no_torch() -> None:
    code = "import sys, subquad.allocator as a; a.keep_freed_memory(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_left_as_they_are(platform, monkeypatch) -> None:
    def never(*_):
        raise AssertionError("nothing may be called here")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", never)
    assert allocator.keep_freed_memory() is False


def test_another_c_library_is_left_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert allocator.keep_freed_memory() is False


class Refusing:
    """A glibc that knows one parameter only."""

    gnu_get_libc_version = None

    def __init__(self, knows: list[int]) -> None:
        self.knows = knows

    def mallopt(self, parameter: int, _: int) -> bool:
        return parameter in self.knows


@pytest.mark.parametrize("knows", [[], [allocator.M_MMAP_THRESHOLD], [allocator.M_TRIM_THRESHOLD]])
def test_a_refusal_is_reported(knows, monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Refusing(knows))
    assert allocator.keep_freed_memory() is False


@pytest.mark.parametrize(("value", "calls"), [(None, 1), ("", 1), ("keep", 1), ("system", 0)])
def test_commands_ask_for_it_unless_told_not_to(value, calls, monkeypatch, capsys) -> None:
    if value is None:
        monkeypatch.delenv(allocator.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(allocator.VARIABLE, value)
    called: list[str] = []
    monkeypatch.setattr(allocator, "keep_freed_memory", partial(called.append, "once"))
    assert run(["info", "softmax"]) == 0
    assert called == ["once"] * calls


def test_an_unknown_choice_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv(allocator.VARIABLE, "jemalloc")
    assert run(["info"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("subquad: error: SUBQUAD_ALLOCATOR is 'jemalloc'; set it to 'system' to leave")
    assert err.count("\n") == 1
