"""Models whose linear maps are fast for the few rows that decoding has at a time.

    float32    the same numbers to rounding; maps of up to 16 rows read their weights at the speed of memory
    int8       weights of linear maps and of the head are rounded to a byte each, which is a quarter to read

Embeddings, adaptive heads and whatever else is no linear map stay as they are. Weights are shared with the given model,
and not copied: changing them in place changes both, except for what was rounded.
"""

import copy
from collections.abc import Callable
from typing import Literal, TypeVar, cast

from torch import Tensor, nn

from subquad.kernels.linear import few_rows_map, int8_map
from subquad.models import Model
from subquad.nn.heads import WordHead

ModelType = TypeVar("ModelType", bound=Model)


LEAST_WEIGHTS = 1 << 16
"""Smaller maps stay in a core's own cache: calling another kernel would cost more than it saves."""


def prepare_for_inference(model: ModelType, weights: Literal["float32", "int8"]) -> ModelType:
    """A copy of a model, in eval mode and for inference, that shares its parameters and buffers."""
    shared: dict[int, object] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    fast = copy.deepcopy(model, shared).eval()
    for module in list(fast.modules()):
        weight = _weight(module)
        if weight is not None and weight.numel() >= LEAST_WEIGHTS:
            module.__class__ = MAPS[type(module)]  # the same object, wherever it is referred to
            make = int8_map if weights == "int8" else few_rows_map
            module.map = make(weight, cast(Tensor | None, module.bias))  # type: ignore[assignment]
    return fast


def _weight(module: nn.Module) -> Tensor | None:
    """The weights of a map that has a faster form; None of anything else."""
    if type(module) is nn.Linear:
        return module.weight
    return module.table if type(module) is WordHead else None


class FastLinear(nn.Linear):
    """`weight` stays there, for mixers that read parts of it."""

    map: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


class FastWordHead(WordHead):
    map: Callable[[Tensor], Tensor]

    def forward(self, features: Tensor) -> Tensor:
        return self.map(features)


MAPS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, WordHead: FastWordHead}
