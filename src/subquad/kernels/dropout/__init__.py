"""Dropout: values set to 0 at random while a model trains."""

from torch import Tensor

from subquad.kernels.dispatch import choose


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """x with values set to 0 at random, each with chance `rate` (to 1/65536), the others scaled to keep the mean."""
    return choose("dropout", x).dropout(x, rate) if training and rate else x
