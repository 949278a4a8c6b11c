"""The emulated GPU itself: what it refuses, what it counts, and that its numbers are right."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.emulated_gpu import memory
from tests.emulated_gpu.counts import counted
from tests.emulated_gpu.programs import needs_emulated_gpu, run_on_emulated_gpu

pytestmark = needs_emulated_gpu


@pytest.mark.nightly
def test_a_report_names_lines_of_subquad(tmp_path: Path) -> None:
    variables = {"SUBQUAD_EMULATED_GPU_REPORT": str(tmp_path / "report.txt"), "SUBQUAD_KERNELS": "reference"}
    run_on_emulated_gpu("subquad", "doctor", **variables)
    report = (tmp_path / "report.txt").read_text()
    assert "mixers/eva.py:" in report
    assert report.startswith("synchronisation: ")


# ---------------------------------------------------------------------- on the device


def gpu(*values: float) -> Tensor:
    return torch.tensor(values, device="cuda")


def check_results_are_real() -> None:
    x = gpu(1.0, 2.0, 3.0)
    assert (x.device.type, x.is_cuda, x[[0, 2]].tolist()) == ("cuda", True, [1.0, 3.0])
    assert (x + torch.arange(3, device="cuda")).tolist() == [1.0, 3.0, 5.0]
    layer = torch.nn.Linear(3, 2).to("cuda")
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 2.0, 3.0]] * 2
    with torch.inference_mode():
        assert x[1:].mul(2).tolist() == [4.0, 6.0]
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def check_tensors_of_two_devices_do_not_meet() -> None:
    x, on_cpu = gpu(1.0, 2.0), torch.ones(2)
    for meet in (lambda: x + on_cpu, lambda: on_cpu.add_(x), lambda: torch.cat([x, on_cpu]), lambda: x @ on_cpu):
        with pytest.raises(RuntimeError, match="on the same device"):
            meet()
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.nn.Embedding(3, 2)(torch.tensor([0], device="cuda"))
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 3.0]  # a number of no dimension may be anywhere


def check_threads_and_kernels_of_triton() -> None:
    from subquad.kernels.conv import gpu as conv

    results: list[Tensor] = []
    x, taps = torch.randn(1, 5, 4), torch.randn(2, 3)
    thread = threading.Thread(target=lambda: results.append(conv.forward(x.to("cuda"), taps.to("cuda"), 1, 5)))
    thread.start()
    thread.join()
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1)).unflatten(-1, (2, 2))
    expected = sum(padded[:, k : k + 5] * taps[:, k, None] for k in range(3)).flatten(2)
    assert torch.allclose(results[0].cpu(), expected, atol=1e-6)
    with pytest.raises(ValueError, match="cpu tensor"):
        conv.forward(x.to("cuda"), taps, 1, 5)


def check_launches() -> None:
    x = gpu(1.0, 2.0, 3.0)
    with counted() as counts:
        y = (x * 2).view(1, 3)[:, 1:].t()  # views launch nothing
        y.add_(1)
    assert (counts.launches, counts.synchronisations) == (2, 0)
    with counted() as counts:
        torch.empty(3, device="cuda")
    assert counts.events == []


def check_synchronisations() -> None:
    x, mask = gpu(1.0, 2.0, 3.0), torch.tensor([True, False, True]).to("cuda")
    waiting = [
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: bool((x > 0).all()),
        lambda: x[mask],
        lambda: mask.nonzero(),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: x[torch.tensor([0, 1])],
        lambda: torch.cuda.synchronize(),
    ]
    for number, wait in enumerate(waiting):
        for inference in (False, True):
            with torch.inference_mode(inference), counted() as counts:
                wait()
            assert counts.synchronisations == 1, (number, inference, counts.report())
    asynchronous = [
        lambda: x[mask.long()],
        lambda: x.masked_fill(mask, 0.0),
        lambda: x.__setitem__(mask, 0.0),
        lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
        lambda: x.to("cpu", non_blocking=True),
    ]
    for number, start in enumerate(asynchronous):
        with counted() as counts:
            start()
        assert counts.synchronisations == 0, (number, counts.report())


def check_copies() -> None:
    with counted() as counts:
        x = torch.zeros(10).to("cuda")
        x[:4].cpu()
    assert counts.copied_bytes == 40 + 16
    assert torch.zeros(3).pin_memory().is_pinned()
    assert not torch.zeros(3).is_pinned()


def check_random_numbers_of_its_own() -> None:
    torch.manual_seed(1)
    on_cpu = torch.rand(3)
    torch.manual_seed(1)
    first, state = torch.rand(3, device="cuda"), torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(3), on_cpu)  # draws of the device left the CPU's alone
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    assert not torch.equal(first, second)


def check_memory() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    view = x[10:]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr() < view.data_ptr()
    assert torch.cuda.memory_allocated() - before == -(-4000 // memory.BLOCK) * memory.BLOCK
    del x
    assert torch.cuda.memory_allocated() > before  # the view still needs it
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() > before
