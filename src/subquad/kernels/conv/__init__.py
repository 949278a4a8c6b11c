"""Convolution over time whose taps are shared by the channels of a head.

    y[b, t, c] = sum_k taps[(b, t,) head(c), k] * x[b, t - before + k, c]        head(c) = c // (C / H), zeros outside

taps: (H, K), the same at every position, or (B, T, H, K), each position's own; with softmax=True they are logits, of
which the softmax over K is taken first. Sums run in float32, or float64 when x is; results come back in the precision
of x. Backward keeps x and what was given as taps, nothing else.

The `torch.library` operations below run what `dispatch.choose` says. Every implementation offers

    forward(x, taps, before, length)              y (B, length, C); x is (B, S, C), length need not be S
    input_gradient(grad, taps, before, size)      (B, size, C), size = S
    tap_gradient(grad, x, before, taps_shape)     in float32 or float64

    softmax(logits)                               over the last axis
    softmax_gradient_(grad, taps)                 that of the logits, given that of taps = softmax(logits); in place

and may offer, for logits (B, T, H, K) of any precision and K up to its MOST_FUSED_TAPS, so that taps are never written:

    softmax_forward(x, logits, before, length)    y
    softmax_gradients(grad, x, logits, before)    those of x and of the logits
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.conv import reference
from subquad.kernels.dispatch import choose
from subquad.kernels.precision import at_least_float32


def tap_conv(x: Tensor, taps: Tensor, before: int, *, softmax: bool = False) -> Tensor:
    """The equation above. x: (B, T, C); before: how many taps lie before the current position, 0 .. K - 1."""
    assert 0 <= before < taps.shape[-1], f"{before} taps before the current position, of {taps.shape[-1]}"
    return _checked(x, taps, before, x.shape[1], softmax)


def tap_conv_extended(extended: Tensor, taps: Tensor, *, softmax: bool = False) -> Tensor:
    """The same for an input that brings its neighbours along: (B, T + K - 1, C) -> (B, T, C).

    Output t reads entries t .. t + K - 1, so a stream passes its last K - 1 inputs and then the new ones.
    """
    return _checked(extended, taps, 0, extended.shape[1] - taps.shape[-1] + 1, softmax)


def normalised_taps(taps: Tensor, softmax: bool) -> Tensor:
    """The taps that a convolution works with, of taps or, with softmax=True, of their logits; without a gradient."""
    return choose("conv", taps).softmax(at_least_float32(taps)) if softmax else taps


def _checked(x: Tensor, taps: Tensor, before: int, length: int, softmax: bool) -> Tensor:
    assert x.shape[-1] % taps.shape[-2] == 0, (x.shape, taps.shape)
    assert taps.dim() == 2 or taps.shape[:2] == (x.shape[0], length), (x.shape, taps.shape)
    if softmax:
        convolve = _softmax_forward if tracing.may_call_directly(x, taps) else _softmax_tap_conv
        return convolve(x, taps, before, length)
    taps = taps.to(_precision(x))
    if tracing.may_call_directly(x, taps):
        return choose("conv", x).forward(x, taps, before, length)
    return _tap_conv(x, taps, before, length)


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------- given taps


@torch.library.custom_op("subquad::tap_conv", mutates_args=())
def _tap_conv(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:
    return choose("conv", x).forward(x, taps, before, length)


@torch.library.custom_op("subquad::tap_conv_input_gradient", mutates_args=())
def _input_gradient(grad: Tensor, taps: Tensor, before: int, size: int) -> Tensor:
    return choose("conv", grad).input_gradient(grad, taps, before, size)


@torch.library.custom_op("subquad::tap_conv_tap_gradient", mutates_args=())
def _tap_gradient(grad: Tensor, x: Tensor, before: int, taps_shape: Sequence[int]) -> Tensor:
    return choose("conv", grad).tap_gradient(grad, x, before, taps_shape)


@_tap_conv.register_fake
def _(x: Tensor, taps: Tensor, before: int, length: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], length, x.shape[2])


@_input_gradient.register_fake
def _(grad: Tensor, taps: Tensor, before: int, size: int) -> Tensor:  # noqa: ARG001
    return grad.new_empty(grad.shape[0], size, grad.shape[2])


@_tap_gradient.register_fake
def _(grad: Tensor, x: Tensor, before: int, taps_shape: Sequence[int]) -> Tensor:  # noqa: ARG001
    return grad.new_empty(taps_shape, dtype=_precision(x))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:  # noqa: ARG001
    x, taps, ctx.before, _ = inputs
    ctx.save_for_backward(x, taps)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, taps = ctx.saved_tensors
    if tracing.differentiates_backward():
        given = (ctx.before, grad.shape[1])
        for_x, for_taps = tracing.gradients_of(lambda x, taps: reference.forward(x, taps, *given), (x, taps), grad)
        return for_x, for_taps, None, None
    for_x = _input_gradient(grad, taps, ctx.before, x.shape[1]) if ctx.needs_input_grad[0] else None
    for_taps = _tap_gradient(grad, x, ctx.before, taps.shape) if ctx.needs_input_grad[1] else None
    return for_x, for_taps, None, None


_tap_conv.register_autograd(_differentiate, setup_context=_keep)

# ---------------------------------------------------------------------- taps that are the softmax of logits


def _softmax_forward(x: Tensor, logits: Tensor, before: int, length: int) -> Tensor:
    kernel = choose("conv", x)
    if _takes_logits(kernel, logits):
        return kernel.softmax_forward(x, logits, before, length)
    return kernel.forward(x, kernel.softmax(logits.to(_precision(x))), before, length)


def _takes_logits(kernel: Any, logits: Tensor) -> bool:
    return logits.dim() == 4 and logits.shape[-1] <= getattr(kernel, "MOST_FUSED_TAPS", 0)


@torch.library.custom_op("subquad::softmax_tap_conv", mutates_args=())
def _softmax_tap_conv(x: Tensor, logits: Tensor, before: int, length: int) -> Tensor:
    return _softmax_forward(x, logits, before, length)


@torch.library.custom_op("subquad::softmax_tap_conv_gradients", mutates_args=())
def _softmax_gradients(grad: Tensor, x: Tensor, logits: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """One operation for both, so that the softmax is computed again once only and its gradient replaces the taps'."""
    kernel = choose("conv", x)
    if _takes_logits(kernel, logits):
        return kernel.softmax_gradients(grad, x, logits, before)
    taps = kernel.softmax(logits.to(_precision(x)))
    for_x = kernel.input_gradient(grad, taps, before, x.shape[1])
    for_logits = kernel.softmax_gradient_(kernel.tap_gradient(grad, x, before, taps.shape), taps)
    return for_x, for_logits.to(logits.dtype)


@_softmax_tap_conv.register_fake
def _(x: Tensor, logits: Tensor, before: int, length: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], length, x.shape[2])


@_softmax_gradients.register_fake
def _(grad: Tensor, x: Tensor, logits: Tensor, before: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return grad.new_empty(x.shape), logits.new_empty(logits.shape)


def _differentiate_softmax(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, logits = ctx.saved_tensors
    if tracing.differentiates_backward():

        def convolve(x: Tensor, logits: Tensor) -> Tensor:
            taps = logits.to(_precision(x)).softmax(-1)
            return reference.forward(x, taps, ctx.before, grad.shape[1])

        for_x, for_logits = tracing.gradients_of(convolve, (x, logits), grad)
        return for_x, for_logits, None, None
    return *_softmax_gradients(grad, x, logits, ctx.before), None, None


_softmax_tap_conv.register_autograd(_differentiate_softmax, setup_context=_keep)
