"""Window attention of sequences and grids as Triton kernels, which never write a matrix of logits.

Forward is one kernel: a program takes some queries of a window and one head, and goes over the keys of the window and
the summaries with a softmax that is corrected from tile to tile. It keeps the logarithm of each query's sum of
exponentials. Backward computes the probabilities again: one kernel for queries, one for keys and values, which a
program gathers from all windows that see them, and one each for summaries and for the bias where they are there. Sums
over many windows are cut into parts, which are added afterwards: no number is written by two programs, and equal inputs
give equal bits. Queries, keys and values are read where the projection wrote them.

Products run on tensor cores in the precision of qkv and are summed in float32. Summaries and bias may have another
precision. A query that sees nothing gets zeros.

Kernels of our own rather than torch's FlexAttention: its blocks of 128 x 128 read two to four times the keys that
windows of 64 have, its masks are built on the host, it needs torch.compile and keys with their summaries in one tensor,
and it cannot be run without a GPU.

With TRITON_INTERPRET=1 in the environment before triton is imported, the same kernels run on CPU tensors.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.triton_tools import dot_precision, register_limit
from subquad.kernels.window_attention import Summaries, Windows, gpu_gradients, gpu_kernels, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LACKS = ("dropout", "heads of more than 128 channels")

SMALLEST = 16
"""The smallest side that tl.dot takes."""
PROGRAMS = 256
"""Sums over a batch are cut into parts until this many programs work: two for each multiprocessor of a GPU."""


def window_attention(
    qkv: Tensor,
    windows: Windows,
    bias: Tensor | None,
    mask: Tensor | None,
    summaries: Summaries | None,
    dropout: float,  # noqa: ARG001 - always 0: see LACKS
) -> Tensor:
    """y (batch, N, heads, d); see the public function."""
    summary_k, summary_v, summary_mask, chunk = (None, None, None, 0) if summaries is None else summaries
    chunks, chunk = (chunk.flatten(), 0) if isinstance(chunk, Tensor) else (None, chunk)
    sizes = (list(windows.shape), windows.size, windows.look_back, windows.look_forward, windows.causal, chunk)
    return torch.ops.subquad.window_attention_gpu(qkv, summary_k, summary_v, bias, mask, summary_mask, chunks, *sizes)[
        0
    ]


# ---------------------------------------------------------------------- launches


class Problem(NamedTuple):
    """The inputs, and what kernels are told about them."""

    qkv: Tensor
    summary_k: Tensor | None
    summary_v: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    summary_mask: Tensor | None
    chunks: Tensor | None
    windows: Windows
    chunk: int

    @classmethod
    def of(cls, inputs: tuple[Any, ...], shape: Sequence[int], *sizes: int) -> "Problem":
        """From the arguments of the operation; copies only what lies in memory as no kernel takes it."""
        qkv, summary_k, summary_v, bias, mask, summary_mask, chunks = inputs
        size, back, forward, causal, chunk = sizes
        windows = Windows(tuple(shape), size, back, forward, bool(causal))
        # every window reads them: in float32 that would take longer than a copy in the precision of qkv
        summary_k, summary_v = (None if t is None else t.to(qkv.dtype).contiguous() for t in (summary_k, summary_v))
        mask, summary_mask = (None if t is None else t.view(torch.uint8).contiguous() for t in (mask, summary_mask))
        qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        return cls(qkv, summary_k, summary_v, bias, mask, summary_mask, chunks, windows, chunk)

    @property
    def cells(self) -> int:
        """Of a window."""
        return self.windows.size ** len(self.windows.shape)

    @property
    def keys(self) -> int:
        """Of a window."""
        return self.windows.keys ** len(self.windows.shape)

    @property
    def num_summaries(self) -> int:
        """Of summaries."""
        return 0 if self.summary_k is None else self.summary_k.shape[2]

    @property
    def all_windows(self) -> int:
        """Of the batch."""
        return self.qkv.shape[0] * (self.qkv.shape[1] // self.cells)

    def outer(self, number: int) -> int:
        """How many of `number` queries, keys or summaries a program works on."""
        bytes_of_head = self.qkv.shape[-1] * self.qkv.element_size()
        return min(64 if bytes_of_head <= 128 else 32 if bytes_of_head <= 256 else 16, _power(number))

    def inner(self, number: int) -> int:
        """How many of `number` it goes over at once. Larger tiles would not fit the registers."""
        small = self.qkv.dtype == torch.float32 or (len(self.windows.shape) == 2 and self.bias is not None)
        return min(16 if small else 32, _power(number))

    def parts(self, programs: int, number: int) -> tuple[int, int]:
        """In how many parts a sum over `number` is cut, of which `programs` are needed, and how long each is."""
        length = max(1, triton.cdiv(number, max(1, min(number, PROGRAMS // max(1, programs)))))
        return triton.cdiv(number, length), length

    def launch(self, kernel: Any, grid: tuple[int, ...], **others: Any) -> None:
        """Runs a kernel with those of its arguments that the problem gives, and with others."""
        known = self._arguments() | others
        arguments = {name: known[name] for name in kernel.arg_names}
        # To prefetch tiles takes registers, which indices on grids and sums of a bias need themselves.
        on_grid = len(self.windows.shape) == 2 and self.qkv.dtype != torch.float32
        stages = 1 if on_grid or kernel is gpu_gradients.bias_gradients else 2
        if all(grid):
            with torch.cuda.device_of(self.qkv):
                kernel[grid](**arguments, num_warps=4, num_stages=stages, **register_limit(self.registers(kernel)))

    def registers(self, kernel: Any) -> int | None:
        """Of a thread, at most. Left to itself, NVIDIA's compiler sends some to memory to have a few threads more."""
        if kernel is gpu_kernels.attend:
            return 168 if len(self.windows.shape) == 1 else 255
        if kernel is gpu_gradients.key_gradients:
            return None if self.windows.causal else 208
        return 255 if kernel is gpu_gradients.summary_gradients else None

    def _arguments(self) -> dict[str, Any]:
        (_, cells, _, heads, width), windows = self.qkv.shape, self.windows
        bias, mask, summary_mask = self.bias, self.mask, self.summary_mask
        rows, columns = windows.shape if len(windows.shape) == 2 else (1, cells)
        strides = self.qkv.stride()
        return {
            "qkv": self.qkv, "bias": bias, "mask": mask, "far_k": self.summary_k, "far_v": self.summary_v,
            "far_mask": summary_mask, "chunks": self.chunks,
            "row_stride": strides[0], "cell_stride": strides[1], "part_stride": strides[2], "head_stride": strides[3],
            "bias_head": 0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
            "bias_query": 0 if bias is None else bias.stride(1), "bias_key": 0 if bias is None else bias.stride(2),
            "mask_stride": cells if mask is not None and mask.shape[0] > 1 else 0,
            "far_mask_stride": self.num_summaries if summary_mask is not None and summary_mask.shape[0] > 1 else 0,
            "rows": rows, "columns": columns, "windows": cells // self.cells, "heads": heads, "cells": cells,
            "count": self.num_summaries, "chunk": self.chunk, "LATER": bool(self.chunk) or self.chunks is not None,
            "WINDOW": windows.size, "BACK": windows.look_back, "SIDE": windows.keys, "AXES": len(windows.shape),
            "CAUSAL": windows.causal, "SCALE": width**-0.5, "WIDTH": width,
            "CHANNELS": _power(width), "PRECISION": dot_precision(),
            "QUERIES": self.outer(self.cells), "KEYS": self.inner(self.keys), "COUNT": self.inner(self.num_summaries),
        }  # fmt: skip


def _power(number: int) -> int:
    """The next power of two that tl.dot takes."""
    return max(SMALLEST, triton.next_power_of_2(number))


@torch.library.custom_op("subquad::window_attention_gpu", mutates_args=())
def _forward(
    qkv: Tensor,
    summary_k: Tensor | None,
    summary_v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    summary_mask: Tensor | None,
    chunks: Tensor | None,
    shape: Sequence[int],
    window: int,
    before: int,
    after: int,
    causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """y, and the logarithms (batch, heads, N) of sums of exponentials."""
    inputs = (qkv, summary_k, summary_v, bias, mask, summary_mask, chunks)
    problem = Problem.of(inputs, shape, window, before, after, causal, chunk)
    y, log_sums = _fake_forward(qkv)
    grid = problem.all_windows * triton.cdiv(problem.cells, problem.outer(problem.cells)), qkv.shape[3]
    problem.launch(gpu_kernels.attend, grid, y=y, log_sums=log_sums)
    return y, log_sums


@torch.library.custom_op("subquad::window_attention_gpu_backward", mutates_args=())
def _backward(
    grad: Tensor,
    y: Tensor,
    log_sums: Tensor,
    qkv: Tensor,
    summary_k: Tensor | None,
    summary_v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    summary_mask: Tensor | None,
    chunks: Tensor | None,
    shape: Sequence[int],
    window: int,
    before: int,
    after: int,
    causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, of keys and values of summaries (2, ...), and of bias; those of what is absent are empty."""
    inputs = (qkv, summary_k, summary_v, bias, mask, summary_mask, chunks)
    problem = Problem.of(inputs, shape, window, before, after, causal, chunk)
    heads, tile = qkv.shape[3], problem.outer(problem.cells)
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    given = {"grad": grad.contiguous(), "log_sums": log_sums, "deltas": torch.empty_like(log_sums)}
    grid = problem.all_windows * triton.cdiv(problem.cells, tile), heads
    problem.launch(gpu_gradients.query_gradients, grid, **given, y=y, d_qkv=d_qkv)
    tiles = {"KEYS": tile, "QUERIES": problem.inner(problem.cells) if problem.bias is None else SMALLEST}
    problem.launch(gpu_gradients.key_gradients, grid, **given, **tiles, d_qkv=d_qkv)
    return d_qkv, _summary_gradients(problem, given), _bias_gradient(problem, given)


def _summary_gradients(problem: Problem, given: dict[str, Tensor]) -> Tensor:
    """Those of the keys and of the values of summaries (2, batch, heads, count, d), in float32."""
    if problem.summary_k is None:
        return problem.qkv.new_empty(0, dtype=torch.float32)
    (batch, heads, count, width), cells = problem.summary_k.shape, problem.qkv.shape[1]
    queries, tile = problem.inner(cells), problem.outer(count)
    programs = batch * heads * triton.cdiv(count, tile)
    parts, length = problem.parts(programs, triton.cdiv(cells, queries))
    sums = problem.qkv.new_empty(parts, 2, batch, heads, count, width, dtype=torch.float32)
    sizes = {"span": length * queries, "QUERIES": queries, "COUNT": tile}
    problem.launch(gpu_gradients.summary_gradients, (programs, parts), **given, **sizes, d_far=sums)
    return sums.sum(0) if parts != 1 else sums.squeeze(0)


def _bias_gradient(problem: Problem, given: dict[str, Tensor]) -> Tensor:
    """That of the bias, in its precision; empty without one."""
    bias, heads = problem.bias, problem.qkv.shape[3]
    if bias is None:
        return problem.qkv.new_empty(0)
    keys, queries = problem.inner(problem.keys), min(32, problem.outer(problem.cells))
    tiles = triton.cdiv(problem.cells, queries) * triton.cdiv(problem.keys, keys)
    parts, span = problem.parts(tiles * heads, problem.all_windows)
    sums = bias.new_empty(parts, heads, problem.cells, problem.keys, dtype=torch.float32)
    sizes = {"span": span, "all_windows": problem.all_windows, "QUERIES": queries}
    problem.launch(gpu_gradients.bias_gradients, (tiles, heads, parts), **given, **sizes, d_bias=sums)
    return sums.sum((0, 1) if bias.shape[0] < heads else 0).view(bias.shape).to(bias.dtype)


# ---------------------------------------------------------------------- registration


@_forward.register_fake
def _fake_forward(qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    batch, cells, _, heads, width = qkv.shape
    log_sums = qkv.new_empty(batch, heads, cells, dtype=torch.float32)
    return qkv.new_empty(batch, cells, heads, width), log_sums


@_backward.register_fake
def _fake_backward(
    grad: Tensor,  # noqa: ARG001
    y: Tensor,  # noqa: ARG001
    log_sums: Tensor,  # noqa: ARG001
    qkv: Tensor,
    summary_k: Tensor | None,
    summary_v: Tensor | None,  # noqa: ARG001
    bias: Tensor | None,
    *others: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_summaries = qkv.new_empty(0 if summary_k is None else (2, *summary_k.shape), dtype=torch.float32)
    return d_qkv, d_summaries, qkv.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.sizes = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 13
    y, log_sums, *inputs = ctx.saved_tensors
    learned, (mask, summary_mask, chunks) = inputs[:4], inputs[4:]
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, summary_k: Tensor | None, summary_v: Tensor | None, bias: Tensor | None) -> Tensor:
            shape, size, before, after, causal, chunk = ctx.sizes
            windows, summaries = Windows(tuple(shape), size, before, after, causal), None
            if summary_k is not None and summary_v is not None:
                sizes = chunk if chunks is None else chunks[:, None]
                summaries = Summaries(summary_k, summary_v, summary_mask, sizes)
            return reference.window_attention(qkv, windows, bias, mask, summaries, 0.0)

        return *tracing.gradients_of(attend, learned, grad), *(None,) * 9
    found = torch.ops.subquad.window_attention_gpu_backward(grad, y, log_sums, *inputs, *ctx.sizes)
    d_qkv, d_summaries, d_bias = found
    gradients = (d_qkv, *((None, None) if learned[1] is None else d_summaries), d_bias)
    present = (None if t is None else gradient.to(t.dtype) for t, gradient in zip(learned, gradients, strict=True))
    return (*present, *(None,) * 9)


_forward.register_autograd(_differentiate, setup_context=_remember)
