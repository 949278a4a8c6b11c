"""Makes the linear maps of a model fast for the few rows that decoding has at a time.

    float32    the same results up to rounding; for up to 16 rows, a CPU reads weights at the speed of memory
    bfloat16   all weights, and with them states and activations, are rounded to two bytes: for GPUs
    int8       weights of linear maps and of the head are rounded to one byte each, a quarter of the memory to read: for
               CPUs; a GPU would turn them into float32 for every step

With float32 and int8, embeddings, adaptive heads and everything else that is not a linear map stay as they are. The new
model shares its weights with the given one: changing them in place changes both models, except for rounded weights and
for what mixers compute from weights alone, such as the softmax of lightconv's filters, which is computed once.
"""

import copy
from collections.abc import Callable
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from subquad.kernels.linear import few_rows_map, int8_map
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.nn.heads import WordHead

ModelType = TypeVar("ModelType", bound=Model)


LEAST_WEIGHTS = 1 << 16
"""Smaller weights fit into the cache of a core: calling another kernel would cost more than it saves."""


def prepare_for_inference(model: ModelType, weights: Literal["float32", "bfloat16", "int8"]) -> ModelType:
    """Returns a copy of a model for inference, in eval mode, that shares its parameters and buffers if it can."""
    if weights == "bfloat16":
        return _with_constants(copy.deepcopy(model).to(torch.bfloat16).eval())
    shared: dict[int, object] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    fast = copy.deepcopy(model, shared).eval()
    for module in list(fast.modules()):
        weight = _weight(module)
        if weight is not None and weight.numel() >= LEAST_WEIGHTS:
            module.__class__ = FAST_CLASSES[type(module)]  # the same object, wherever it is referred to
            build_map = int8_map if weights == "int8" else few_rows_map
            module.map = build_map(weight, cast(Tensor | None, module.bias))  # type: ignore[assignment]
    return _with_constants(fast)


def _with_constants(model: ModelType) -> ModelType:
    for module in model.modules():
        if isinstance(module, Mixer):
            module.freeze_constants()
    return model


def _weight(module: nn.Module) -> Tensor | None:
    """Returns the weights of a module that has a fast version, or None."""
    if type(module) is nn.Linear:
        return module.weight
    return module.weight if type(module) is WordHead else None


class FastLinear(nn.Linear):
    """A fast linear map. It keeps `weight`, because some mixers use parts of it."""

    map: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


class FastWordHead(WordHead):
    """A fast output head."""

    map: Callable[[Tensor], Tensor]

    def forward(self, features: Tensor) -> Tensor:
        return self.map(features)


FAST_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, WordHead: FastWordHead}
