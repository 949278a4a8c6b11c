"""Training-time randomness, and the maxima that keep exponentials in range: all that a gradient treats as given.

Every draw comes from one function, which tests replace to feed stored draws back; so they do with `constant`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["normal", "categorical"]
Draw = Callable[[Kind, Tensor, Sequence[int]], Tensor]


def from_generator(kind: Kind, like: Tensor, shape: Sequence[int]) -> Tensor:
    if kind == "normal":
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    return torch.multinomial(like.flatten(0, -2), 1, replacement=True).view(tuple(shape))


_source: Draw = from_generator


def normal(shape: Sequence[int], like: Tensor) -> Tensor:
    """Independent N(0, 1) values of `shape`, on the device and in the precision of `like`."""
    return _source("normal", like, shape)


def categorical(probabilities: Tensor) -> Tensor:
    """One index per row of `probabilities` (..., n), drawn from that row: (...)."""
    return _source("categorical", probabilities, probabilities.shape[:-1])


def constant(statistic: Tensor) -> Tensor:
    """What stabilising maxima are taken of, or such a maximum: the gradient treats it as a constant."""
    return statistic.detach()


@contextmanager
def drawing_from(source: Draw) -> Iterator[None]:
    """Within the block, draws come from `source(kind, like, shape)` instead of torch's generator."""
    global _source
    previous, _source = _source, source
    try:
        yield
    finally:
        _source = previous
