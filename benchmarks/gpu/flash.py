"""FlashAttention-2 as the count models it: what `scaled_dot_product_attention` launches in bfloat16 on a GPU.

    forward    4 B H T S d FLOPs, reads q, k, v and writes y and a number for each query; one launch
    backward   2.5 times the FLOPs, reads q, k, v, y, dy and writes dq, dk, dv; three launches

of T queries and S keys; causal attention has half of the FLOPs. Short sequences do not reach the full speed, `FLASH`
and `FLASH_CAUSAL` of a GPU, but S / (S + 160) of it, causal ones S / (S + 450): curves near what is reported of
FlashAttention-2 with heads of 64, all its launches together. The count has FLOPs over this share. In float32 a kernel
of the same bytes multiplies without tensor cores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.hardware import FLASH, FLASH_CAUSAL, FLOAT32

RAMP, RAMP_CAUSAL = 160, 450
STATISTIC_BYTES = 4  # the logarithm of a query's sum, in float32
Record = Callable[[str, int, tuple[tuple[str, int], ...], list[Tensor]], None]


@contextmanager
def modelled_attention(record: Record) -> Iterator[None]:
    """record(name, bytes, flops, inputs) gets the launches of scaled_dot_product_attention within it."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001 - dropout changes neither bytes nor FLOPs
        is_causal: bool = False,
    ) -> Tensor:
        assert attn_mask is None, "the flash kernel takes no mask"
        if torch.is_autocast_enabled("cuda"):
            q, k, v = (one.to(torch.get_autocast_dtype("cuda")) for one in (q, k, v))
        return _Flash.apply(q, k, v, is_causal, record)

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, record: Record) -> Tensor:
        y = _like(q, v.shape[-1])
        ctx.save_for_backward(q, k, v, y)
        ctx.causal, ctx.record = causal, record
        record("flash_attention", _bytes(q, k, v, y) + _statistics(q), _flops(q, k, v, causal, 1.0), [q, k, v])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, y = ctx.saved_tensors
        gradients = _like(q, q.shape[-1]), _like(k, k.shape[-1]), _like(v, v.shape[-1])
        ctx.record("flash_attention_backward_products", 0, (), [y, grad])
        moved = _bytes(q, k, v, y, grad, *gradients) + _statistics(q)
        ctx.record("flash_attention_backward", moved, _flops(q, k, v, ctx.causal, 2.5), [q, k, v])
        ctx.record("flash_attention_backward_convert", 0, (), [q])
        return *gradients, None, None


def _like(x: Tensor, width: int) -> Tensor:
    """(B, H, T, width) whose heads lie beside one another in memory, as the kernel has it."""
    batch, heads, time, _ = x.shape
    return x.new_empty(batch, time, heads, width).transpose(1, 2)


def _flops(q: Tensor, k: Tensor, v: Tensor, causal: bool, factor: float) -> tuple[tuple[str, int], ...]:
    keys = k.shape[2]
    products = 2 * q.numel() * keys + 2 * q.numel() // q.shape[-1] * v.shape[-1] * keys
    if q.dtype == torch.float32:
        return ((FLOAT32, round(factor * products / (2 if causal else 1))),)
    share = keys / (keys + (RAMP_CAUSAL if causal else RAMP))
    return ((FLASH_CAUSAL if causal else FLASH, round(factor * products / share / (2 if causal else 1))),)


def _statistics(q: Tensor) -> int:
    return STATISTIC_BYTES * q.numel() // q.shape[-1]


def _bytes(*tensors: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
