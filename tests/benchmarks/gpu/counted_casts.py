"""Run by `test_counting.py`, in a process that has a fake CUDA device."""

import pytest
import torch

from benchmarks.gpu.counting import counting
from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda, move_to_fake_cuda
from subquad.nn.block import BlockInputs
from subquad.nn.stack import Stack, StackConfig


@pytest.mark.parametrize("mechanism", ["softmax", "lightconv", "dynamicconv", "local", "eva", "lara", "linformer"])
def check_autocast_casts_the_inputs_of_a_block_once(mechanism: str) -> None:
    """Those of its mixer and its feed-forward network, from the norms' float32; and their gradients back."""
    stack = Stack(StackConfig(layers=1, dim=128, heads=2, ffn_dim=256, norm="pre", mixer=mechanism))
    with fake_cuda():
        move_to_fake_cuda(stack.train())
        x = torch.empty(4, 500, 128, device=DEVICE, requires_grad=True) + 1  # no leaf, whose cast autocast keeps
        with counting() as counter:
            with torch.autocast("cuda", torch.bfloat16):
                y = stack(x, BlockInputs()).x
            counter.phase = "backward"
            y.backward(torch.empty_like(y))
    casts = [kernel for kernel in counter.kernels if kernel.name in ("_to_copy", "to.dtype")]
    whole = [kernel.phase for kernel in casts if kernel.bytes >= 4 * 500 * 128 * (4 + 2)]
    assert (whole.count("forward"), whole.count("backward")) == (2, 4)
