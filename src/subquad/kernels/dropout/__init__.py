"""Dropout: values set to 0 at random while a model trains."""

from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.dispatch import choose, has_kernel
from subquad.kernels.dropout import reference


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """x with values set to 0 at random, each with chance `rate` (to 1/65536), the others scaled to keep the mean."""
    if not training or not rate:
        return x
    # a graph has torch's own dropout, and so has a GPU, whatever kernels are asked for
    kernel = reference if tracing.is_tracing() or not has_kernel("dropout", x) else choose("dropout", x)
    return kernel.dropout(x, rate)
