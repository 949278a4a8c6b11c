"""Values and means of chunks as Triton kernels: a program has one chunk and one head.

It goes over the positions of its chunk in tiles, with a softmax that is corrected from tile to tile, and keeps the
logarithm of the sum of exponentials. Backward goes over them once more and *adds* to the gradient of qkv that what
follows has left, in place: chunks lie side by side, so that each position is written by one program. Autograd itself
would have every function that reads qkv write a gradient of its own, and read all of them again to add them up, which
takes longer than the kernels do.

w may have another precision than qkv, as autocast leaves it in float32 after a norm. All is computed in float32. With
TRITON_INTERPRET=1 in the environment before triton is imported, the same kernels run on CPU tensors.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.chunk_values import gpu_kernels, reference
from subquad.kernels.triton_tools import register_limit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TILE = 2048
"""Numbers in a tile: 16 for each of the 128 threads of a program."""


def chunk_values(qkv: Tensor, w: Tensor, mask: Tensor | None, size: int | Tensor) -> tuple[Tensor, Tensor]:
    """qkv, and u (batch, heads, chunks, d); see the public function."""
    sizes, size = (size, 0) if isinstance(size, Tensor) else (None, size)
    return _Values.apply(qkv, w, mask, sizes, size)


def chunk_means(qkv: Tensor, mask: Tensor | None, size: int | Tensor, divisors: Tensor) -> tuple[Tensor, ...]:
    """qkv, and the means of queries and of keys; see the public function."""
    sizes, size = (size, 0) if isinstance(size, Tensor) else (None, size)
    return _Means.apply(qkv, mask, sizes, size, divisors)


class _Values(torch.autograd.Function):
    """Passes qkv on, so that backward gets the gradient of all that follows together with that of u."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, w: Tensor, mask: Tensor | None, sizes: Tensor | None, size: int
    ) -> tuple[Tensor, Tensor]:
        u, log_sums = _average(qkv, w, mask, sizes, size)
        ctx.save_for_backward(qkv, w, u, log_sums, mask, sizes)
        ctx.size = size
        ctx.set_materialize_grads(False)
        return qkv.view_as(qkv), u

    @staticmethod
    def backward(ctx: Any, d_qkv: Tensor | None, d_u: Tensor | None) -> tuple[Tensor | None, ...]:
        qkv, w, u, log_sums, mask, sizes = ctx.saved_tensors
        if d_u is None:  # nothing depends on u
            return d_qkv, *(None,) * 4
        if tracing.differentiates_backward():
            size = ctx.size if sizes is None else sizes
            own, d_w = tracing.gradients_of(lambda qkv, w: reference.chunk_values(qkv, w, mask, size)[1], (qkv, w), d_u)
            return _total(d_qkv, own), d_w, *(None,) * 3
        d_qkv = _own(d_qkv, qkv)
        d_w = _add_gradients(d_qkv, d_u, qkv, w, u, log_sums, mask, sizes, ctx.size)
        return d_qkv, d_w, *(None,) * 3


class _Means(torch.autograd.Function):
    """Passes qkv on, likewise."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, mask: Tensor | None, sizes: Tensor | None, size: int, divisors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(qkv, mask, sizes, divisors)
        ctx.size = size
        ctx.set_materialize_grads(False)
        return qkv.view_as(qkv), *_mean(qkv, mask, sizes, size, divisors)

    @staticmethod
    def backward(ctx: Any, d_qkv: Tensor | None, *d_means: Tensor | None) -> tuple[Tensor | None, ...]:
        qkv, mask, sizes, divisors = ctx.saved_tensors
        known = [one for one in d_means if one is not None]
        if not known:
            return d_qkv, *(None,) * 4
        grads = [torch.zeros_like(known[0]) if one is None else one for one in d_means]
        if tracing.differentiates_backward():
            size = ctx.size if sizes is None else sizes
            (own,) = tracing.gradients_of(
                lambda qkv: reference.chunk_means(qkv, mask, size, divisors)[1:], (qkv,), *grads
            )
            return _total(d_qkv, own), *(None,) * 4
        d_qkv = _own(d_qkv, qkv)
        _add_to_members(d_qkv, *grads, mask, sizes, ctx.size, divisors)
        return d_qkv, *(None,) * 4


def _own(d_qkv: Tensor | None, qkv: Tensor) -> Tensor:
    """The gradient so far as a contiguous tensor that may be changed.

    Nobody else has the one that the kernels of what follows made. A graph must not change what it is given; compilers
    leave out the copy where they can.
    """
    if d_qkv is None:
        return torch.zeros_like(qkv, memory_format=torch.contiguous_format)
    return d_qkv.clone(memory_format=torch.contiguous_format) if tracing.is_tracing() else d_qkv.contiguous()


def _total(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


# ---------------------------------------------------------------------- operations


@torch.library.custom_op("subquad::chunk_values_gpu", mutates_args=())
def _average(qkv: Tensor, w: Tensor, mask: Tensor | None, sizes: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """u in the precision of qkv, and the logarithms (batch, heads, chunks) of sums of exponentials."""
    u, log_sums = _fake_average(qkv, w)
    _launch(gpu_kernels.average, qkv, mask, sizes, size, w.shape[2], w=w.contiguous(), u=u, log_sums=log_sums)
    return u, log_sums


@torch.library.custom_op("subquad::chunk_values_gpu_backward", mutates_args={"d_qkv"})
def _add_gradients(
    d_qkv: Tensor,
    grad: Tensor,
    qkv: Tensor,
    w: Tensor,
    u: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    sizes: Tensor | None,
    size: int,
) -> Tensor:
    """The gradient of w, given that of u; those of keys and values are added to d_qkv, which is contiguous."""
    d_w = torch.empty_like(w, memory_format=torch.contiguous_format)
    given = {"w": w.contiguous(), "u": u, "log_sums": log_sums, "grad": grad.contiguous()}
    _launch(gpu_kernels.add_gradients, qkv, mask, sizes, size, w.shape[2], **given, d_qkv=d_qkv, d_w=d_w)
    return d_w


@torch.library.custom_op("subquad::chunk_means_gpu", mutates_args=())
def _mean(qkv: Tensor, mask: Tensor | None, sizes: Tensor | None, size: int, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the queries and of the keys of chunks, each (batch, heads, chunks, d), in the precision of qkv."""
    queries, keys = _fake_mean(qkv, mask, sizes, size, divisors)
    given = {"divisors": divisors, "q_means": queries, "k_means": keys}
    _launch(gpu_kernels.means_of_members, qkv, mask, sizes, size, divisors.shape[1], **given)
    return queries, keys


@torch.library.custom_op("subquad::chunk_means_gpu_backward", mutates_args={"d_qkv"})
def _add_to_members(
    d_qkv: Tensor,
    q_grad: Tensor,
    k_grad: Tensor,
    mask: Tensor | None,
    sizes: Tensor | None,
    size: int,
    divisors: Tensor,
) -> None:
    """Adds what the gradients (batch, heads, chunks, d) of means give queries and keys to d_qkv, contiguous."""
    given = {"q_grad": q_grad.contiguous(), "k_grad": k_grad.contiguous(), "divisors": divisors}
    _launch(gpu_kernels.add_to_members, d_qkv, mask, sizes, size, divisors.shape[1], **given)


@_average.register_fake
def _fake_average(qkv: Tensor, w: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return qkv.new_empty(w.shape), qkv.new_empty(w.shape[:3], dtype=torch.float32)


@_add_gradients.register_fake
def _fake_add_gradients(d_qkv: Tensor, grad: Tensor, qkv: Tensor, w: Tensor, *others: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(w, memory_format=torch.contiguous_format)


@_mean.register_fake
def _fake_mean(
    qkv: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    sizes: Tensor | None,  # noqa: ARG001
    size: int,  # noqa: ARG001
    divisors: Tensor,
) -> tuple[Tensor, Tensor]:
    shape = qkv.shape[0], qkv.shape[3], divisors.shape[1], qkv.shape[4]
    return qkv.new_empty(shape), qkv.new_empty(shape)


@_add_to_members.register_fake
def _(*others: Any) -> None:  # noqa: ARG001
    return


def _launch(
    kernel: Any, qkv: Tensor, mask: Tensor | None, sizes: Tensor | None, size: int, chunks: int, **others: Any
) -> None:
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    batch, time, _, heads, width = qkv.shape
    strides = qkv.stride()
    channels = triton.next_power_of_2(width)
    mask = None if mask is None else mask.view(torch.uint8).contiguous()
    if "divisors" in others:
        divisors = others["divisors"].contiguous()
        others |= {"divisors": divisors, "divisor_stride": chunks if divisors.shape[0] > 1 else 0}
    known = others | {
        "qkv": qkv, "mask": mask, "sizes": None if sizes is None else sizes.contiguous(),
        "row_stride": strides[0], "time_stride": strides[1], "part_stride": strides[2], "head_stride": strides[3],
        "mask_stride": 0 if mask is None or mask.shape[0] == 1 else time,
        "time": time, "chunks": chunks, "size": size, "heads": heads,
        "SCALE": width**-0.5, "WIDTH": width, "CHANNELS": channels, "TIME": max(1, min(64, TILE // channels)),
    }  # fmt: skip
    if batch and heads and chunks:
        with torch.cuda.device_of(qkv):
            kernel[(batch * chunks, heads)](
                **{name: known[name] for name in kernel.arg_names}, num_warps=4, **register_limit(168)
            )
