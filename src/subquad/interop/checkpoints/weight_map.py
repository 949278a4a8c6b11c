"""Maps the tensors of an original program to the parameters of one of our modules, and copies them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

ModuleType = TypeVar("ModuleType", bound=nn.Module)


@dataclass(frozen=True)
class ParamRef:
    """A parameter or buffer of ours, or some of its rows, that an original's tensor is copied to.

    rows: the rows of our tensor, and source_rows: the rows of the original's tensor. None stands for all rows.
    """

    name: str
    rows: slice | None = None
    source_rows: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the rows of our tensor (or of its gradient) that are referred to."""
        return tensor if self.rows is None else tensor[self.rows]

    def of_source(self, original: Tensor) -> Tensor:
        """Returns the rows of the original's tensor that are copied."""
        return original if self.source_rows is None else original[self.source_rows]

    @property
    def place(self) -> tuple[str, int | None]:
        """Equal for two references to the same rows."""
        return self.name, self.rows.start if self.rows else None


WeightMap = dict[str, ParamRef]
"""From the name of an original's tensor to where it goes."""


@dataclass(frozen=True)
class ConvertedModule(Generic[ModuleType]):
    """A mixer or model with the weights of an original, and the map that says where each of them went."""

    module: ModuleType
    weight_map: Mapping[str, ParamRef]


def load_weights(
    module: ModuleType, state: Mapping[str, Tensor], weight_map: Mapping[str, ParamRef], unused: Iterable[str] = ()
) -> ConvertedModule[ModuleType]:
    """Copies an original's state dict into a mixer or model.

    unused: names (or prefixes that end in ".") of tensors that the original stores but does not compute with. Nothing
    is guessed: every stored name must be in the map, every name in the map must be stored, the numbers of values must
    agree, and every parameter of ours must be filled. Names that share a place, as tied weights do, must have the same
    values.
    """
    owner = getattr(module, "name", type(module).__name__)
    skipped = tuple(unused)
    unknown = [name for name in state if name not in weight_map and not _is_unused(name, skipped)]
    missing = [name for name in weight_map if name not in state]
    if unknown or missing:
        lists = f"unknown: {unknown or 'none'}; missing: {missing or 'none'}"
        raise ValueError(f"{owner}: the weights do not fit the config; {lists}")
    ours = dict(module.named_parameters()) | dict(module.named_buffers())
    filled = {ref.name for ref in weight_map.values()}
    if empty := [name for name, _ in module.named_parameters() if name not in filled]:
        raise ValueError(f"{owner}: the weights do not fit the config; nothing is stored for {empty}")
    first_names: dict[tuple[str, int | None], str] = {}
    with torch.no_grad():
        for name, ref in weight_map.items():
            target, given = ref.of(ours[ref.name]), ref.of_source(state[name])
            if target.numel() != given.numel():
                raise ValueError(f"{owner}: {name} is {tuple(given.shape)}, expected {tuple(target.shape)}")
            given = given.reshape(target.shape)
            first = first_names.setdefault(ref.place, name)
            if first != name and not torch.equal(target, given.to(target)):
                raise ValueError(f"{owner}: the weights do not fit the config; {first} and {name} are tied, but differ")
            target.copy_(given)
    return ConvertedModule(module, weight_map)


def _is_unused(name: str, unused: Iterable[str]) -> bool:
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in unused)


def map_tensors(converted: ConvertedModule[ModuleType], originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors that belong to an original's parameters, such as moments of Adam, by the names of ours.

    Names of the original may be missing: parameters of ours that get nothing are left out, and rows that get nothing
    are 0.
    """
    ours = dict(converted.module.named_parameters())
    result: dict[str, Tensor] = {}
    for name, original in originals.items():
        ref = converted.weight_map[name]
        if ref.name not in result:
            result[ref.name] = torch.zeros_like(ours[ref.name])
        target = ref.of(result[ref.name])
        target.copy_(ref.of_source(original).reshape(target.shape))
    return result


def map_linear(original: str, ours: str, bias: bool = True) -> WeightMap:
    """Maps the weight, and the bias if there is one, of a linear map or norm."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{original}.{part}": ParamRef(f"{ours}.{part}") for part in parts}


def map_stacked(originals: Iterable[str], ours: str, width: int, bias: bool = True) -> WeightMap:
    """Maps several linear maps of the original to the rows of one of ours, `width` rows each."""
    weight_map = {}
    for number, original in enumerate(originals):
        rows = slice(number * width, (number + 1) * width)
        for part in ("weight", "bias") if bias else ("weight",):
            weight_map[f"{original}.{part}"] = ParamRef(f"{ours}.{part}", rows)
    return weight_map


def add_prefixes(weight_map: Mapping[str, ParamRef], original: str, ours: str) -> WeightMap:
    """Returns the map of a part as a map of the whole: the names of both programs get a prefix."""
    return {original + name: replace(ref, name=ours + ref.name) for name, ref in weight_map.items()}


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
