"""Pieces of an operation on threads of their own."""

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from subquad.kernels import parallel
from subquad.kernels.parallel import parallel_map
from subquad.mixers import build


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def where(_: int) -> tuple[str, int]:
    return threading.current_thread().name, torch.get_num_threads()


def test_results_come_in_order_from_threads_that_work_alone() -> None:
    together = threading.Barrier(2, timeout=60)

    def meet(item: int) -> tuple[int, str, int]:
        together.wait()  # only passes if two pieces run at the same time
        return item, *where(item)

    results = list(parallel_map(meet, range(4)))
    assert [item for item, _, _ in results] == [0, 1, 2, 3]
    assert len({name for _, name, _ in results}) == 2
    assert {number for _, _, number in results} == {1}
    assert torch.get_num_threads() == 2, "the caller keeps its threads"


def test_threads_that_begin_later_are_as_many_as_before() -> None:
    list(parallel_map(where, range(4)))
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [2]


def test_few_pieces_and_a_single_thread_stay_with_the_caller() -> None:
    here = threading.current_thread().name
    assert list(parallel_map(where, range(1))) == [(here, 2)]
    torch.set_num_threads(1)
    assert list(parallel_map(where, range(4))) == [(here, 1)] * 4


def test_an_error_of_a_piece_is_the_callers() -> None:
    def fail(item: int) -> None:
        if item == 2:
            raise ArithmeticError("piece 2")

    with pytest.raises(ArithmeticError, match="piece 2"):
        list(parallel_map(fail, range(4)))


def test_pieces_run_without_gradients_and_in_the_callers_inference_mode() -> None:
    modes = list(parallel_map(lambda _: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()), range(2)))
    assert modes == [(False, False)] * 2
    with torch.inference_mode():
        room = torch.empty(4)
        list(parallel_map(lambda item: room[item].fill_(item), range(4)))
        assert room.tolist() == [0, 1, 2, 3]


def test_a_forked_process_has_threads_of_its_own() -> None:
    list(parallel_map(where, range(4)))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        torch.set_num_threads(2)
        queue.put([number for _, number in parallel_map(where, range(4))])

    process = context.Process(target=child)
    process.start()
    assert queue.get(timeout=60) == [1] * 4
    process.join(60)
    assert process.exitcode == 0
    assert parallel._workers is not None, "the parent keeps its own"


FUSED: dict[str, dict[str, Any]] = {
    "local": {"window": 8, "overlap": True, "relative": "t5"},
    "eva": {"window": 8, "landmarks": 4},
    "causal eva": {"window": 8, "chunk_size": 4, "relative": "t5", "variant": "decoder", "causal": True},
    "lara": {"landmarks": 4},
    "performer": {"features": 8, "projection": "learnable"},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", FUSED)
def test_fused_mixers_do_not_depend_on_the_threads(name: str, batch: int) -> None:
    """Same results twice on two threads, and to rounding those of one thread, gradients included."""
    torch.manual_seed(0)
    mixer = build(name.split()[-1], dim=32, heads=4, **FUSED[name]).double().eval()
    x = torch.randn(batch, 61, 32, dtype=torch.float64)
    padding = torch.arange(61) >= torch.tensor([61, 40, 5])[:batch, None]

    def results(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        leaf = x.clone().requires_grad_()
        y = mixer(leaf, padding=padding if batch > 1 else None).y
        parameters = [p for p in mixer.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.square().sum(), [leaf, *parameters], allow_unused=True)]

    single, double, again = results(1), results(2), results(2)
    for one, two, same in zip(single, double, again, strict=True):
        if one is not None:
            assert torch.equal(two, same)
            torch.testing.assert_close(two, one, atol=1e-10, rtol=1e-10)
