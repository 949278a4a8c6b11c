"""Linear maps of a few rows: what decoding spends its time on, one token after the other.

    few_rows_linear    y[r, n] = sum_k x[r, k] weight[n, k] + bias[n]                                  float32
    int8_linear        y[r, n] = c[r] s[n] sum_k i[r, k] values[n, k] + bias[n]                        weights of a byte

int8: values[n] = round(weight[n] / s[n]) with s[n] = max |weight[n]| / 127, made once by `to_int8`. Each row of x is
rounded as well, i[r] = round(x[r] / c[r]), to as many of 16 bits as keep the sums below 2^31: at least 13 for 2,048
channels, so that what is lost is lost in the weights. Sums are exact, and a row's result is its own, whatever rows come
along.

Both are for inference. numba runs them on the CPU (cpu.py), torch elsewhere.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.dispatch import choose
from subquad.kernels.linear.reference import INT8_LARGEST

FEW_ROWS = 16
"""Up to so many rows the time of reading the weights decides, which torch's products reach half of."""


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias): x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or not _plain(x, weight) or _differentiates(x, weight):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    # The operation costs more than the kernel's own call; what is compiled needs it.
    call = _few_rows_op if tracing.is_tracing() else _few_rows
    return call(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])


def few_rows_map(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> few_rows_linear(x, weight, bias), for weights that stay where they are: they are looked at once only."""
    whole = partial(few_rows_linear, weight=weight, bias=bias)
    if not _plain(weight, weight):
        return whole
    return _called_directly(choose("linear", weight).linear_by(weight, bias), whole, weight, FEW_ROWS)


def int8_map(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> int8_linear(x, *to_int8(weight), bias); what the kernel needs of the weights is made once."""
    values, scale = to_int8(weight)
    whole = partial(int8_linear, values=values, scale=scale, bias=bias)
    kernel = choose("linear", scale).int8_linear_by(values, scale, bias)
    return _called_directly(kernel, whole, weight, sys.maxsize)


def _called_directly(
    kernel: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor], weight: Tensor, most_rows: int
) -> Callable[[Tensor], Tensor]:
    """x -> whole(x), by kernel(x) where x has no more than `most_rows` rows of float32 and nobody differentiates."""
    width = weight.shape[1]

    def apply(x: Tensor) -> Tensor:
        rows = x.numel() // width
        if rows > most_rows or x.dtype != torch.float32 or tracing.is_tracing() or _differentiates(x, weight):
            return whole(x)
        return kernel(x)

    return apply


def int8_linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The equation above. x: (..., in); values: (out, in) int8; scale, bias: (out,) float32 -> (..., out)."""
    if _differentiates(x, scale):
        raise ValueError("int8 weights are for inference; call the model inside torch.inference_mode()")
    flat = x.reshape(-1, x.shape[-1]).float()
    call = _int8_op if tracing.is_tracing() else _int8
    return call(flat, values, scale, bias).view(*x.shape[:-1], values.shape[0]).to(x.dtype)


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """values (out, in) int8 and scale (out,) float32 of weights (out, in)."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / INT8_LARGEST
    whole = (weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    return whole.to(torch.int8), scale


def _plain(x: Tensor, weight: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and weight.is_contiguous()


def _differentiates(*tensors: Tensor) -> bool:
    graded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return graded or tracing.is_transformed()


# ---------------------------------------------------------------------- the operations; x: (rows, in), contiguous


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return choose("linear", x).linear_by(weight, bias)(x)


def _int8(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return choose("linear", x).int8_linear_by(values, scale, bias)(x)


_few_rows_op = torch.library.custom_op("subquad::few_rows_linear", _few_rows, mutates_args=())
_int8_op = torch.library.custom_op("subquad::int8_linear", _int8, mutates_args=())


@_few_rows_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[0])


@_int8_op.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], values.shape[0])
