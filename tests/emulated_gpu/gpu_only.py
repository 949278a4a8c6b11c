"""Operations that torch has for GPUs only, on CPU tensors: products of half precision with sums in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    return _write(a.to(dtype) @ b.to(dtype), out)


def _added_product(
    total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Tensor:
    return _write(beta * total.to(dtype) + alpha * (a.to(dtype) @ b.to(dtype)), out)


def _write(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


OPERATIONS: dict[Any, Callable[..., Tensor]] = {
    aten.mm.dtype: _product,
    aten.mm.dtype_out: _product,
    aten.bmm.dtype: _product,
    aten.bmm.dtype_out: _product,
    aten.addmm.dtype: _added_product,
    aten.addmm.dtype_out: _added_product,
    aten.baddbmm.dtype: _added_product,
    aten.baddbmm.dtype_out: _added_product,
}
